// SPDX-License-Identifier: Apache-2.0
#include "spillway/comm/launch.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr int kMostRanks = 1 << 20;

// The names by which one launcher calls the four numbers.
struct Names {
  Launcher launcher = Launcher::none;
  const char *rank = "", *size = "", *local_rank = "", *local_size = "";
};
constexpr Names kTorchrun = {Launcher::torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kMpirun = {Launcher::mpirun, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
// SLURM_PROCID and SLURM_NTASKS stand in the environment of a batch script too, which is no rank; the step's do not.
constexpr Names kSrun = {Launcher::srun, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                         "SLURM_STEP_TASKS_PER_NODE"};

const std::string* find(const Variables& variables, std::string_view name) {
  const auto found = variables.find(name);
  return found == variables.end() || found->second.empty() ? nullptr : &found->second;
}

std::optional<int> find_number(const Variables& variables, const char* name, int least, int most) {
  const std::string* text = find(variables, name);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  require(error == std::errc() && end == text->data() + text->size(),
          fmt::format("the environment variable {} is \"{}\"; expected a whole number", name, *text));
  require(value >= least && value <= most,
          fmt::format("the environment variable {} is {}; expected {} to {}", name, value, least, most));
  return value;
}

int read_number(const Variables& variables, const Names& names, const char* name, int least, int most) {
  const std::optional<int> value = find_number(variables, name, least, most);
  require(value.has_value(), fmt::format("{} sets the environment variable {}, which is missing while others of its "
                                         "variables are set: start the program with {}, or unset them all",
                                         to_string(names.launcher), name, to_string(names.launcher)));
  return *value;
}

bool any_of(const Variables& variables, const Names& names) {
  for (const char* name : {names.rank, names.size, names.local_rank, names.local_size}) {
    if (find(variables, name) != nullptr) return true;
  }
  return false;
}

// "4(x2),3": tasks of each node; of the node with this number.
int tasks_of_node(const std::string& text, int node) {
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto fail = [&] {
    throw InvalidArgument(fmt::format(
        "the environment variable SLURM_STEP_TASKS_PER_NODE is \"{}\", which does not say how many tasks node {} has",
        text, node));
  };
  while (at < end) {
    int tasks = 0, nodes = 1;
    auto read = std::from_chars(at, end, tasks);
    if (read.ec != std::errc() || tasks < 1) fail();
    at = read.ptr;
    if (end - at > 3 && at[0] == '(' && at[1] == 'x') {
      read = std::from_chars(at + 2, end, nodes);
      if (read.ec != std::errc() || read.ptr == end || *read.ptr != ')') fail();
      at = read.ptr + 1;
    }
    if (node < nodes) return tasks;
    node -= nodes;
    if (at < end && *at++ != ',') fail();
  }
  fail();
  return 0;
}

int local_size_of(const Variables& variables, const Names& names, int size) {
  if (names.launcher != Launcher::srun) return read_number(variables, names, names.local_size, 1, size);
  const std::string* tasks = find(variables, names.local_size);
  require(tasks != nullptr, "srun sets the environment variable SLURM_STEP_TASKS_PER_NODE, which is missing");
  const int node = read_number(variables, names, "SLURM_NODEID", 0, size - 1);
  const int local = tasks_of_node(*tasks, node);
  require(local <= size,
          fmt::format("SLURM_STEP_TASKS_PER_NODE ({}) names more tasks than SLURM_STEP_NUM_TASKS ({})", *tasks, size));
  return local;
}

Launch read_numbers(const Variables& variables, const Names& names) {
  Launch launch;
  launch.launcher = names.launcher;
  launch.size = read_number(variables, names, names.size, 1, kMostRanks);
  launch.rank = read_number(variables, names, names.rank, 0, launch.size - 1);
  launch.local_size = local_size_of(variables, names, launch.size);
  launch.local_rank = read_number(variables, names, names.local_rank, 0, launch.local_size - 1);
  return launch;
}

// RANK and the like may be exported by hand beside mpirun's own: then both must mean the same.
void require_same(const Variables& variables, const Names& names, const Launch& launch) {
  const std::array<std::pair<const char*, int>, 4> known = {{{kTorchrun.rank, launch.rank},
                                                             {kTorchrun.size, launch.size},
                                                             {kTorchrun.local_rank, launch.local_rank},
                                                             {kTorchrun.local_size, launch.local_size}}};
  const std::array<const char*, 4> theirs = {names.rank, names.size, names.local_rank, names.local_size};
  for (std::size_t i = 0; i < known.size(); ++i) {
    const std::string* text = find(variables, known[i].first);
    require(
        text == nullptr || *text == std::to_string(known[i].second),
        fmt::format("the environment variable {} is {}, but {} set {} to mean {}: unset {}, or start the program with "
                    "one launcher alone",
                    known[i].first, text == nullptr ? "" : *text, to_string(names.launcher), theirs[i], known[i].second,
                    known[i].first));
  }
}

void read_address(const Variables& variables, Launch& launch) {
  const std::string* address = find(variables, "MASTER_ADDR");
  const std::optional<int> port = find_number(variables, "MASTER_PORT", 1, 65535);
  if (port) launch.master_port = *port;
  if (address != nullptr) {
    launch.master_address = *address;
  } else if (launch.local_size < launch.size) {
    launch.master_address.clear();
  }
  if (launch.launcher == Launcher::torchrun) {
    require(address != nullptr, "torchrun sets the environment variable MASTER_ADDR, which is missing");
    require(port.has_value(), "torchrun sets the environment variable MASTER_PORT, which is missing");
    const std::string* agent = find(variables, "TORCHELASTIC_USE_AGENT_STORE");
    launch.store_runs = agent != nullptr && *agent == "True";
    launch.attempt = find_number(variables, "TORCHELASTIC_RESTART_COUNT", 0, 1 << 20).value_or(0);
  }
}

// mpiexec of MPICH, Intel MPI and others name ranks by PMI's variables alone, which do not say who shares a host. Taken
// for no launcher, each of its processes would train by itself.
void require_no_other_launcher(const Variables& variables) {
  const int size = find_number(variables, "PMI_SIZE", 0, kMostRanks).value_or(1);
  require(size <= 1, fmt::format("the environment variable PMI_SIZE says that {} processes were started together, by a "
                                 "launcher that is not known here; expected torchrun, srun or Open MPI's mpirun: start "
                                 "the program with one of these, or unset PMI_SIZE to train in each process by itself",
                                 size));
}

}  // namespace

std::string_view to_string(Launcher launcher) {
  static constexpr std::array<std::string_view, 4> kWords = {"no launcher", "torchrun", "mpirun", "srun"};
  return kWords[static_cast<std::size_t>(launcher)];
}

Variables launch_variables() {
  Variables variables;
  const auto add = [&](const char* name) {
    if (const char* value = std::getenv(name)) variables[name] = value;
  };
  for (const Names& names : {kTorchrun, kMpirun, kSrun}) {
    for (const char* name : {names.rank, names.size, names.local_rank, names.local_size}) add(name);
  }
  for (const char* name : {"SLURM_NODEID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
                           "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE"})
    add(name);
  return variables;
}

Launch read_launch(const Variables& variables) {
  const bool torchrun = any_of(variables, kTorchrun), mpirun = any_of(variables, kMpirun);
  // A batch script has SLURM_PROCID without being a step's task.
  const bool srun = find(variables, kSrun.size) != nullptr;
  Launch launch;
  if (torchrun && (find(variables, "TORCHELASTIC_RUN_ID") != nullptr || (!mpirun && !srun))) {
    launch = read_numbers(variables, kTorchrun);
  } else if (mpirun || srun) {
    const Names& names = mpirun ? kMpirun : kSrun;
    launch = read_numbers(variables, names);
    require_same(variables, names, launch);
  } else {
    require_no_other_launcher(variables);
  }
  read_address(variables, launch);
  return launch;
}

}  // namespace spillway
