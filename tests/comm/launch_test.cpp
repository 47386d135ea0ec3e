// SPDX-License-Identifier: Apache-2.0
#include "spillway/comm/launch.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "spillway/core/error.h"
#include "support/contains.h"

namespace spillway {
namespace {

using test::contains;

Variables torchrun(const std::string& rank, const std::string& size) {
  return {{"RANK", rank},
          {"WORLD_SIZE", size},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "node7"},
          {"MASTER_PORT", "29411"},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_RESTART_COUNT", "2"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

Variables mpirun(const std::string& rank, const std::string& size) {
  return {{"OMPI_COMM_WORLD_RANK", rank},
          {"OMPI_COMM_WORLD_SIZE", size},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
}

Variables srun(const std::string& rank, const std::string& size, const std::string& tasks) {
  return {{"SLURM_PROCID", rank},
          {"SLURM_STEP_NUM_TASKS", size},
          {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", tasks}};
}

std::string error_of(const Variables& variables) {
  try {
    static_cast<void>(read_launch(variables));
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

void add(Variables& to, const Variables& more) {
  to.insert(more.begin(), more.end());
}

TEST(Launch, WithoutALauncherIsOneRank) {
  const Launch launch = read_launch({});
  EXPECT_EQ(launch.launcher, Launcher::none);
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.size, 1);
  EXPECT_EQ(launch.master_address, "127.0.0.1");
}

TEST(Launch, ReadsTorchrun) {
  const Launch launch = read_launch(torchrun("3", "4"));
  EXPECT_EQ(launch.launcher, Launcher::torchrun);
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.master_address, "node7");
  EXPECT_EQ(launch.master_port, 29411);
  EXPECT_TRUE(launch.store_runs);
  EXPECT_EQ(launch.attempt, 2);
}

TEST(Launch, ReadsMpirun) {
  Launch launch = read_launch(mpirun("1", "2"));
  EXPECT_EQ(launch.launcher, Launcher::mpirun);
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.size, 2);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.master_address, "127.0.0.1");
  EXPECT_FALSE(launch.store_runs);
  EXPECT_EQ(read_launch(mpirun("1", "4")).master_address, "");  // several hosts, and nobody says where rank 0 is
  Variables variables = mpirun("1", "4");
  variables["MASTER_ADDR"] = "node0";
  EXPECT_EQ(read_launch(variables).master_address, "node0");
}

TEST(Launch, ReadsSrunWithItsListOfTasks) {
  const struct {
    const char* tasks;
    int local_size;
  } rows[] = {{"2(x3)", 2}, {"1,2,3", 3}, {"1(x2),4", 4}, {"1,2(x4)", 2}};
  for (const auto& row : rows) {
    const Launch launch = read_launch(srun("5", "8", row.tasks));
    EXPECT_EQ(launch.launcher, Launcher::srun);
    EXPECT_EQ(launch.rank, 5);
    EXPECT_EQ(launch.size, 8);
    EXPECT_EQ(launch.local_rank, 1);
    EXPECT_EQ(launch.local_size, row.local_size) << row.tasks;
  }
  for (const char* tasks : {"2", "1,2", "2(x3", "x", "0,0,0", "1;2;3", "2(y3)"}) {
    EXPECT_TRUE(contains(error_of(srun("5", "8", tasks)), {"SLURM_STEP_TASKS_PER_NODE"})) << tasks;
  }
}

TEST(Launch, ABatchScriptIsNoTask) {
  const Launch launch = read_launch({{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}});
  EXPECT_EQ(launch.launcher, Launcher::none);
  EXPECT_EQ(launch.size, 1);
}

TEST(Launch, TheLauncherNearestToTheProcessCounts) {
  Variables variables = torchrun("3", "4");
  add(variables, srun("1", "8", "2(x4)"));
  add(variables, mpirun("0", "3"));
  EXPECT_EQ(read_launch(variables).launcher, Launcher::torchrun);
  variables = mpirun("1", "2");
  add(variables, srun("5", "8", "2(x4)"));
  EXPECT_EQ(read_launch(variables).launcher, Launcher::mpirun);
}

TEST(Launch, ALauncherThatIsNotKnownIsRefused) {
  const Variables hydra = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
  EXPECT_TRUE(contains(error_of(hydra), {"PMI_SIZE says that 4 processes", "torchrun, srun or Open MPI's mpirun"}));
  EXPECT_EQ(read_launch({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).size, 1);
  for (Variables known : {srun("5", "8", "2(x4)"), mpirun("1", "2"), torchrun("1", "2")}) {  // srun sets PMI_SIZE too
    add(known, hydra);
    EXPECT_EQ(error_of(known), "no error");
  }
  ASSERT_EQ(::setenv("PMI_SIZE", "3", 1), 0);
  EXPECT_EQ(launch_variables()["PMI_SIZE"], "3");
  ::unsetenv("PMI_SIZE");
}

TEST(Launch, AHalfSetEnvironmentIsRefusedByName) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = torchrun("1", "2");
    variables.erase(name);
    EXPECT_TRUE(contains(error_of(variables), {"torchrun sets the environment variable ", name})) << name;
    variables[name] = "";  // set to nothing is not set
    EXPECT_TRUE(contains(error_of(variables), {name})) << name;
  }
  for (const auto& [name, value] : mpirun("1", "2")) {
    Variables variables = mpirun("1", "2");
    variables.erase(name);
    EXPECT_TRUE(contains(error_of(variables), {"mpirun sets the environment variable " + name})) << name;
  }
  for (const char* name : {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"}) {
    Variables variables = srun("5", "8", "2(x4)");
    variables.erase(name);
    EXPECT_TRUE(contains(error_of(variables), {"srun sets the environment variable ", name})) << name;
  }
  EXPECT_TRUE(contains(error_of({{"WORLD_SIZE", "4"}}), {"RANK", "missing"}));
}

TEST(Launch, ValuesThatCannotBeAreRefusedByName) {
  const struct {
    const char* name;
    const char* value;
    const char* says;
  } rows[] = {{"RANK", "2", "RANK is 2; expected 0 to 1"},
              {"RANK", "-1", "RANK is -1; expected 0 to 1"},
              {"RANK", "one", "RANK is \"one\"; expected a whole number"},
              {"RANK", "1x", "RANK is \"1x\"; expected a whole number"},
              {"WORLD_SIZE", "0", "WORLD_SIZE is 0"},
              {"LOCAL_RANK", "2", "LOCAL_RANK is 2; expected 0 to 1"},
              {"LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE is 3; expected 1 to 2"},
              {"MASTER_PORT", "70000", "MASTER_PORT is 70000; expected 1 to 65535"}};
  for (const auto& row : rows) {
    Variables variables = torchrun("1", "2");
    variables[row.name] = row.value;
    EXPECT_TRUE(contains(error_of(variables), {row.says})) << row.name << "=" << row.value;
  }
}

TEST(Launch, TwoLaunchersThatSayTheSameAreTakenAndOthersRefused) {
  Variables variables = mpirun("1", "2");
  variables["RANK"] = "1";
  variables["WORLD_SIZE"] = "2";
  EXPECT_EQ(read_launch(variables).launcher, Launcher::mpirun);
  variables["WORLD_SIZE"] = "4";
  EXPECT_TRUE(contains(error_of(variables), {"WORLD_SIZE is 4, but mpirun set OMPI_COMM_WORLD_SIZE to mean 2"}));
}

// ---- ranks on the host
// -----------------------------------------------------------------------------------------------

TEST(HostCommunicator, IsOneRankWithoutALauncherAndWithAnyThatStartsOne) {
  EXPECT_EQ(make_host_communicator({})->transport(), "one rank");
  Launch launch;
  launch.launcher = Launcher::torchrun;
  EXPECT_EQ(make_host_communicator(launch)->size(), 1);
}

TEST(HostCommunicator, TorchrunWithoutGpusIsRefusedWithAdvice) {
  try {
    static_cast<void>(make_host_communicator(read_launch(torchrun("1", "2"))));
    FAIL() << "torchrun was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(contains(error.what(), {"torchrun started 2 ranks", "mpirun -n 2", "srun -n 2"}));
  }
}

TEST(HostCommunicator, RanksThatNobodyStartedAreRefused) {
  Launch launch;
  launch.size = 3;
  EXPECT_THROW(static_cast<void>(make_host_communicator(launch)), InvalidArgument);
}

}  // namespace
}  // namespace spillway
