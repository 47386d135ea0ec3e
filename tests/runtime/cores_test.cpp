// SPDX-License-Identifier: Apache-2.0
// Where the CPU optimizer's threads go, on hosts that are folders.

#include "spillway/runtime/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <numeric>
#include <set>
#include <thread>

#include "kernels/cpu_kernels.h"
#include "runtime/device_work.h"
#include "spillway/core/error.h"
#include "spillway/lane/thread_team.h"
#include "spillway/runtime/machine.h"
#include "support/contains.h"
#include "support/host_folder.h"

namespace spillway {
namespace {

/// A host with its topology and limits below a folder of its own.
class HostWithCores : public test::HostFolder {
 public:
  /// `cores` a node, each with a second thread whose number is higher by the number of all cores.
  void make_cores(int nodes, int cores) {
    const int all = nodes * cores;
    for (int node = 0; node < nodes; ++node) {
      const int first = node * cores, last = first + cores - 1;
      write("sys/devices/system/node/node" + std::to_string(node) + "/cpulist",
            std::to_string(first) + "-" + std::to_string(last) + "," + std::to_string(first + all) + "-" +
                std::to_string(last + all));
    }
    for (int i = 0; i < 2 * all; ++i) {
      write("sys/devices/system/cpu/cpu" + std::to_string(i) + "/topology/core_cpus_list",
            std::to_string(i % all) + "," + std::to_string(i % all + all));
    }
    allowed_.resize(static_cast<std::size_t>(2 * all));
    std::iota(allowed_.begin(), allowed_.end(), 0);
  }
  void allow(std::vector<int> processors) { allowed_ = std::move(processors); }
  HostCores read() const { return read_host_cores(root(), allowed_); }
  CorePlan plan(const CoreRequest& request = {}) const { return plan_cores(request, read()); }

 private:
  std::vector<int> allowed_{0};
};

using Processors = std::vector<int>;

TEST(Cores, ThreadsTakeTheLastPhysicalCoresOfOneNode) {
  HostWithCores host;
  host.make_cores(2, 8);
  EXPECT_EQ(host.read().cores.size(), 16u) << "hardware threads of one core are one core";
  const CorePlan plan = host.plan({.threads = 3});
  EXPECT_EQ(plan.processors, (Processors{5, 6, 7}));
  EXPECT_EQ(plan.description, "3 threads on cores 5,6,7 of node 0");
  EXPECT_EQ(host.plan().processors, (Processors{0, 1, 2, 3, 4, 5, 6, 7})) << "half of the cores: one node";
  EXPECT_EQ(host.plan({.threads = 10}).processors.front(), 6) << "more than a node has: the last of all nodes";
}

TEST(Cores, AffinityIsRespected) {
  HostWithCores host;
  host.make_cores(2, 4);
  host.allow({1, 6, 7, 9, 14});  // 9 and 14 are the second threads of 1 and 6
  const HostCores cores = host.read();
  ASSERT_EQ(cores.cores.size(), 3u);
  EXPECT_EQ(cores.processors, 5);
  EXPECT_EQ(host.plan({.threads = 2}).processors, (Processors{6, 7})) << "node 1 has most";
  host.allow({13});
  EXPECT_EQ(host.plan({.threads = 1}).processors, (Processors{13}))
      << "the second thread of a core whose first is not allowed";
}

TEST(Cores, AContainersLimitIsRespected) {
  HostWithCores host;
  host.make_cores(1, 16);
  EXPECT_EQ(host.plan().threads, 8);
  host.write("sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_EQ(host.read().limit, 4);
  EXPECT_EQ(host.plan().threads, 2);
  EXPECT_EQ(host.plan({.threads = 6}).threads, 6) << "what is asked for is given";
  host.write("sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(host.read().limit, 0);
  // The limit may be that of a group further up.
  host.write("proc/self/cgroup", "0::/pod/job");
  host.write("sys/fs/cgroup/pod/cpu.max", "250000 100000");
  host.write("sys/fs/cgroup/pod/job/cpu.max", "max 100000");
  EXPECT_EQ(host.read().limit, 2);
  host.write("sys/fs/cgroup/pod/job/cpu.max", "10000 100000");
  EXPECT_EQ(host.read().limit, 1) << "a tenth of a processor is one thread";
}

TEST(Cores, TheOlderControlGroupsLimitToo) {
  HostWithCores host;
  host.make_cores(1, 8);
  host.write("proc/self/cgroup", "12:pids:/x\n4:cpu,cpuacct:/docker/a");
  host.write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "300000");
  host.write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(host.read().limit, 3);
  host.write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(host.read().limit, 0);
}

TEST(Cores, ProcessesOfAHostTakeDisjointCores) {
  HostWithCores host;
  host.make_cores(2, 8);
  for (int size : {1, 2, 3, 4, 8, 16}) {
    std::set<int> taken;
    std::size_t count = 0;
    for (int rank = 0; rank < size; ++rank) {
      const CorePlan plan = host.plan({.local_rank = rank, .local_size = size});
      EXPECT_GE(plan.processors.size(), 1u) << rank << " of " << size;
      taken.insert(plan.processors.begin(), plan.processors.end());
      count += plan.processors.size();
    }
    EXPECT_EQ(taken.size(), count) << size << " processes";
  }
  EXPECT_EQ(host.plan({.local_rank = 1, .local_size = 2}).processors, (Processors{12, 13, 14, 15})) << "node 1";
}

TEST(Cores, ChoicesOfTheUserComeFirst) {
  HostWithCores host;
  host.make_cores(1, 8);
  EXPECT_EQ(host.plan({.cores = "1-2,5"}).processors, (Processors{1, 2, 5}));
  EXPECT_EQ(host.plan({.threads = 2, .cores = "1-2,5"}).processors, (Processors{1, 2}));
  const CorePlan any = host.plan({.threads = 3, .cores = "any"});
  EXPECT_EQ(any.threads, 3);
  EXPECT_TRUE(any.processors.empty());
  EXPECT_EQ(any.description, "3 threads anywhere: as asked for");
  EXPECT_THROW(host.plan({.threads = 4, .cores = "1-2,5"}), InvalidArgument);
  EXPECT_THROW(host.plan({.local_rank = 2, .local_size = 2}), InvalidArgument);
  for (const char* bad : {"x", "1-", "-1", "3-1", "1,,2", "99999999999", "1;2"}) {
    EXPECT_THROW(host.plan({.cores = bad}), InvalidArgument) << bad;
  }
}

TEST(Cores, AListIsSharedOutToTheProcessesOfAHost) {
  HostWithCores host;
  host.make_cores(1, 8);
  const auto of = [&](int rank, int size, int threads) {
    return host.plan({.threads = threads, .cores = "0-3,6", .local_rank = rank, .local_size = size}).processors;
  };
  EXPECT_EQ(of(0, 2, 0), (Processors{0, 1}));
  EXPECT_EQ(of(1, 2, 0), (Processors{2, 3, 6}));
  EXPECT_EQ(of(1, 2, 2), (Processors{2, 3}));
  EXPECT_EQ(of(4, 5, 1), (Processors{6}));
  const auto refusal = [&](int size, int threads) {
    try {
      of(0, size, threads);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_TRUE(test::contains(refusal(2, 3), {"3 optimizer threads were asked for in each of the 2 processes",
                                             "\"0-3,6\"", "which are 5; expected at least 6"}));
  EXPECT_TRUE(test::contains(refusal(6, 0), {"\"0-3,6\"", "which are 5; expected at least 6: the 6 processes"}));
}

TEST(Cores, ProcessesThatALauncherBoundUseWhatTheyMay) {
  HostWithCores host;
  host.make_cores(1, 16);
  host.allow({4, 5, 6, 7, 20, 21, 22, 23});
  const CoreRequest request{.local_rank = 0, .local_size = 5};
  const CorePlan crowded = host.plan(request);
  EXPECT_EQ(crowded.threads, 1);
  EXPECT_EQ(crowded.description, "1 thread anywhere: 5 processes share 4 cores");
  host.write("sys/devices/system/cpu/online", "0-31");
  const CorePlan bound = host.plan(request);
  EXPECT_EQ(bound.threads, 2) << "half of what they may use";
  EXPECT_TRUE(bound.processors.empty()) << "they inherit it";
  EXPECT_EQ(bound.description, "2 threads anywhere: this process is bound to 4 cores");
  EXPECT_EQ(host.plan({.local_rank = 1, .local_size = 4}).processors, (Processors{5})) << "a core for each";
}

TEST(Cores, MoreThreadsThanCoresRunAnywhere) {
  HostWithCores host;
  host.make_cores(1, 2);
  const CorePlan plan = host.plan({.threads = 5});
  EXPECT_EQ(plan.threads, 5);
  EXPECT_TRUE(plan.processors.empty());
  EXPECT_EQ(plan.description, "5 threads anywhere: there are 2 cores for them");
}

TEST(Cores, AHostThatTellsNothingHasOneNodeOfItsProcessors) {
  HostWithCores host;
  host.allow({0, 1, 2, 3});
  EXPECT_EQ(host.read().cores.size(), 4u);
  EXPECT_EQ(host.plan().processors, (Processors{2, 3}));
}

TEST(Cores, OfThisHostAreThoseThatThisProcessMayUse) {
  const HostCores host = read_host_cores();
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  EXPECT_EQ(host.processors, CPU_COUNT(&set));
  ASSERT_FALSE(host.cores.empty());
  for (const Core& core : host.cores) EXPECT_TRUE(CPU_ISSET(core.processor, &set));
  EXPECT_GE(available_cores(), 1);
}

// ---- what they are for -----------------------------------------------------------------------------

TEST(ThreadTeam, MembersStayOnTheirCoresWhateverOpenMPIsTold) {
  const std::vector<Core> cores = read_host_cores().cores;
  std::vector<int> processors;
  for (const Core& core : cores) processors.push_back(core.processor);
  ASSERT_EQ(::setenv("OMP_NUM_THREADS", "1", 1), 0);
  std::thread([&] {  // whose affinity the team changes
    ThreadTeam team(static_cast<int>(processors.size()), processors);
    for (int round = 0; round < 3; ++round) {
      std::vector<int> seen(processors.size(), -1);
      team.parallel_for(static_cast<std::int64_t>(processors.size()), [&](std::int64_t begin, std::int64_t end) {
        EXPECT_EQ(end, begin + 1) << "each member has a slice";
        cpu_set_t set;
        ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
        EXPECT_EQ(CPU_COUNT(&set), 1);
        seen[static_cast<std::size_t>(begin)] = sched_getcpu();
      });
      EXPECT_EQ(seen, processors);
    }
  })
      .join();
}

TEST(ThreadTeam, RefusesCoresThatItCannotHave) {
  EXPECT_THROW(ThreadTeam(2, {0}), InvalidArgument);
  EXPECT_THROW(ThreadTeam(1, {1 << 20}), InvalidArgument);
  EXPECT_THROW(ThreadTeam(1, {-1}), InvalidArgument);
}

TEST(InstructionSet, OfAMachineIsTheOneAskedForOrRefusedByName) {
  for (std::string_view name : kernels::cpu_kernel_names()) {
    MachineOptions options;
    options.instruction_set = std::string(name);
    const auto machine = make_emulated_machine(options);
    const float source[3] = {1, 2.5f, -3};
    float target[3] = {};
    machine->host_work().widen({}, target, source, kernels::Element::f32, 3);
    EXPECT_EQ(target[2], -3) << name;
  }
  MachineOptions options;
  options.instruction_set = "mmx";
  try {
    static_cast<void>(make_emulated_machine(options));
    FAIL() << "a set that does not exist was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("baseline"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace spillway
