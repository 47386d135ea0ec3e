// SPDX-License-Identifier: Apache-2.0
// One rank of a run that a launcher started.
//
// Usage: comm_rank SCENARIO [RANK] [CALLS]   RANK does what the scenario names after CALLS rounds
//   verbs       every verb, also with pieces cut small          none        rounds of calls
//   place       prints the rank's place
//   kill, stop  RANK gets the signal        throw  it throws       other  it makes another call
//   end         it ends early               exit   it leaves without a word, with status 0
//   finalize    ends MPI itself, after a communicator's end
// Environment: none of its own; the timeout of ranks is 4 s.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <stdexcept>
#include <thread>

#include "comm/verbs.h"
#include "spillway/comm/launch.h"
#include "spillway/comm/transports.h"

namespace spillway {
namespace {

constexpr double kTimeout = 4;
constexpr int kRounds = 400;

void verbs(const Launch& launch) {
  int cells = 0;
  for (const std::int64_t largest : {std::int64_t{1} << 30, std::int64_t{1000}}) {
    CommOptions options;
    options.largest_message = {largest};
    const auto comm = make_host_communicator(launch, options);
    for (const test::VerbCase& each : test::verb_cases()) {
      each.body(*comm);
      ++cells;
    }
  }
  if (launch.rank == 0) std::cout << cells << " cells passed with " << launch.size << " ranks\n";
}

void show_place(const Launch& launch) {
  const auto comm = make_host_communicator(launch);
  std::cout << "rank " << comm->rank() << " of " << comm->size() << ", here " << comm->local_rank() << " of "
            << comm->local_size() << ", by " << to_string(launch.launcher) << " through " << comm->transport()
            << std::endl;
}

void misbehave(const std::string& how, Communicator& comm) {
  if (how == "kill") raise(SIGKILL);
  if (how == "stop") raise(SIGSTOP);
  if (how == "throw") throw std::runtime_error("no memory is left");
  if (how == "exit") std::exit(0);
  if (how == "other") {
    std::array<std::byte, 12> data{};
    comm.broadcast({"another"}, data.data(), {12}, 1);
  }
}

// A round has calls of all three orders, from two threads.
void rounds(const Launch& launch, const std::string& how, int who, int after) {
  CommOptions options;
  options.timeout = Seconds{kTimeout};
  const auto comm = make_host_communicator(launch, options);
  std::vector<float> values(100'000, 1.0f);
  const SumRun run{values.data(), static_cast<std::int64_t>(values.size())};
  for (int i = 0; i < kRounds; ++i) {
    if (comm->rank() == who && i == after) {
      if (how == "end") return;
      misbehave(how, *comm);
    }
    comm->all_reduce({"gradients", i}, {&run, 1}, DType::f32);
    static_cast<void>(comm->any({"finite", i}, false));
    std::fill(values.begin(), values.end(), 1.0f);
  }
}

int run(int argc, char** argv) {
  const std::string scenario = argc > 1 ? argv[1] : "";
  const Launch launch = read_launch(launch_variables());
  if (scenario == "verbs") {
    verbs(launch);
  } else if (scenario == "place") {
    show_place(launch);
  } else if (scenario == "finalize") {
    make_host_communicator(launch)->barrier({"before MPI ends"});
    MPI_Finalize();
  } else {
    rounds(launch, scenario, argc > 2 ? std::atoi(argv[2]) : -1, argc > 3 ? std::atoi(argv[3]) : 0);
  }
  return 0;
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  try {
    return spillway::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "comm_rank: " << error.what() << std::endl;
    return 3;
  }
}
