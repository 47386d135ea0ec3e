// SPDX-License-Identifier: Apache-2.0
//
// The cells of ranks_engine_test for ranks that are processes: to be started by mpirun. Every cell ends in the bits of
// the resident run at stage 0 whose ranks are threads of this process. Prints "80 cells passed with N ranks" on rank 0.
#include <cstdio>
#include <exception>
#include <memory>

#include "spillway/comm/launch.h"
#include "support/bits.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace {

using spillway::Communicator;
using spillway::Config;
using spillway::test::FinalState;
using spillway::test::RunOptions;

bool same(const std::map<std::string, torch::Tensor>& a, const std::map<std::string, torch::Tensor>& b) {
  for (const auto& [name, tensor] : a) {
    if (b.count(name) == 0 || !spillway::test::same_bits(tensor, b.at(name))) {
      std::printf("%s differs\n", name.c_str());
      return false;
    }
  }
  return a.size() == b.size();
}

bool same(const FinalState& a, const FinalState& b) {
  return same(a.weights, b.weights) && same(a.masters, b.masters) && same(a.first_moments, b.first_moments) &&
         same(a.second_moments, b.second_moments) && a.updates == b.updates && a.norms == b.norms &&
         a.statuses == b.statuses;
}

FinalState train(Communicator& ranks, const Config& config, std::int64_t micro_batches) {
  RunOptions options{.steps = 6, .micro_batches = micro_batches};
  options.engine.communicator = &ranks;
  return spillway::test::train(spillway::test::tiny_llama(true), config, options);
}

FinalState train_on_threads(int count, int rank, const Config& config, std::int64_t micro_batches) {
  FinalState mine;
  spillway::test::on_thread_ranks(count, [&](Communicator& ranks) {
    FinalState state = train(ranks, config, micro_batches);
    if (ranks.rank() == rank) mine = std::move(state);
  });
  return mine;
}

int run(Communicator& ranks) {
  int passed = 0, failed = 0;
  for (const bool reduce_last : {false, true}) {
    for (const std::int64_t micro_batches : {1, 3}) {
      for (const double clip : {0.0, 0.5}) {
        for (const spillway::DType precision : {spillway::DType::f32, spillway::DType::bf16}) {
          Config base = spillway::test::tiny_config("resident", clip, 1 << 20, 1);
          base.stage = 0;
          base.precision = precision;
          base.reduce_last_only = reduce_last;
          const FinalState expected = train_on_threads(ranks.size(), ranks.rank(), base, micro_batches);
          for (const int stage : {0, 1, 2}) {
            if (stage == 2 && reduce_last) continue;
            for (const char* schedule : {"resident", "zero_offload"}) {
              Config config = spillway::test::tiny_config(schedule, clip, 4096, 1);
              config.stage = stage;
              config.precision = precision;
              config.reduce_last_only = reduce_last;
              const bool well = same(expected, train(ranks, config, micro_batches));
              ++(well ? passed : failed);
              if (!well)
                std::printf("rank %d: %s, stage %d, %d micro-batches, clip %g%s differs\n", ranks.rank(), schedule,
                            stage, static_cast<int>(micro_batches), clip, reduce_last ? ", reduced last" : "");
            }
          }
        }
      }
    }
  }
  const bool all_well = !ranks.any({"outcome"}, failed > 0);
  if (ranks.rank() == 0 && all_well) std::printf("%d cells passed with %d ranks\n", passed, ranks.size());
  return all_well ? 0 : 1;
}

}  // namespace

int main() {
  try {
    const auto ranks = spillway::make_host_communicator(spillway::read_launch(spillway::launch_variables()));
    return run(*ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank_cells: %s\n", error.what());
    return 1;
  }
}
