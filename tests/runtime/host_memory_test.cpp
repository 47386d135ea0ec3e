// SPDX-License-Identifier: Apache-2.0
// How much memory a process may still take, on hosts that are folders.

#include <gtest/gtest.h>

#include "spillway/runtime/machine.h"
#include "support/host_folder.h"

namespace spillway {
namespace {

using Host = test::HostFolder;

std::int64_t left(const Host& host) {
  return available_host_memory(host.root()).value_or(Bytes{-1}).value;
}

void write_group(Host& host, const std::string& group, const std::string& limit, int used, int cached) {
  host.write(group + "/memory.max", limit);
  host.write(group + "/memory.current", std::to_string(used));
  host.write(group + "/memory.stat", "anon 1\nfile 2\ninactive_anon 4\ninactive_file " + std::to_string(cached) +
                                         "\nactive_file " + std::to_string(cached));
}

TEST(HostMemory, IsWhatTheSystemHasLeftWhereNothingLimits) {
  Host host;
  EXPECT_EQ(left(host), -1) << "nothing is known";
  host.write("proc/meminfo", "MemTotal:  90 kB\nMemFree:  1 kB\nMemAvailable:   50 kB");
  EXPECT_EQ(left(host), 51200);
  write_group(host, "sys/fs/cgroup", "max", 70000, 1);
  EXPECT_EQ(left(host), 51200);
}

TEST(HostMemory, CachedFilesCountAsFree) {
  Host host;
  host.write("proc/meminfo", "MemAvailable:   50 kB");
  write_group(host, "sys/fs/cgroup", "10000", 9000, 0);
  EXPECT_EQ(left(host), 1000);
  write_group(host, "sys/fs/cgroup", "10000", 9000, 4000);
  EXPECT_EQ(left(host), 9000);
  write_group(host, "sys/fs/cgroup", "10000", 11000, 0);
  EXPECT_EQ(left(host), 0) << "more than the limit is used";
  write_group(host, "sys/fs/cgroup", "10000", 100, 400);
  EXPECT_EQ(left(host), 10000) << "the files' counters may run ahead of the sum";
}

TEST(HostMemory, TheTightestGroupCounts) {
  Host host;
  host.write("proc/meminfo", "MemAvailable:   50 kB");
  host.write("proc/self/cgroup", "0::/pod/job");
  write_group(host, "sys/fs/cgroup/pod", "20000", 5000, 1000);
  write_group(host, "sys/fs/cgroup/pod/job", "max", 3000, 0);
  EXPECT_EQ(left(host), 17000) << "a limit further up";
  write_group(host, "sys/fs/cgroup/pod/job", "4000", 3000, 0);
  EXPECT_EQ(left(host), 1000);
}

TEST(HostMemory, TheOlderControlGroupsLimitToo) {
  Host host;
  host.write("proc/meminfo", "MemAvailable:   50 kB");
  host.write("proc/self/cgroup", "12:pids:/x\n4:memory:/docker/a\n0::/");
  const std::string top = "sys/fs/cgroup/memory", group = top + "/docker/a";
  host.write(top + "/memory.limit_in_bytes", "9223372036854771712");  // no limit
  host.write(top + "/memory.usage_in_bytes", "80000");
  EXPECT_EQ(left(host), 51200);
  host.write(group + "/memory.limit_in_bytes", "30000");
  host.write(group + "/memory.usage_in_bytes", "25000");
  host.write(group + "/memory.stat", "inactive_file 1\nactive_file 1\ntotal_inactive_file 4000\ntotal_active_file 500");
  EXPECT_EQ(left(host), 9500);
  host.write("proc/self/cgroup", "4:memory:/docker/unseen");
  host.write(top + "/memory.limit_in_bytes", "90000");
  EXPECT_EQ(left(host), 10000) << "a container sees its own group as the top one";
}

TEST(HostMemory, OfThisHostIsSome) {
  EXPECT_GT(available_host_memory().value_or(Bytes{}).value, 0);
}

}  // namespace
}  // namespace spillway
