// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "spillway/comm/transports.h"
#include "train/training_runs.h"

namespace spillway::test {

/// Calls body(communicator) on every rank of a world of threads, and throws the error of the first that failed.
inline void on_thread_ranks(int count, const std::function<void(Communicator&)>& body, CommOptions options = {{60}}) {
  auto ranks = make_thread_ranks(count, options);
  std::vector<std::exception_ptr> errors(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Communicator> mine = std::move(ranks[r]);
      try {
        body(*mine);
      } catch (const std::exception& error) {
        errors[r] = std::current_exception();
        mine->fail(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

using MakeModel = std::function<std::shared_ptr<CausalLM>()>;

/// Trains on every rank of a world of threads.
inline std::vector<FinalState> train_ranks(int count, const MakeModel& make, const Config& config,
                                           const RunOptions& options) {
  std::vector<FinalState> out(static_cast<std::size_t>(count));
  on_thread_ranks(count, [&](Communicator& ranks) {
    RunOptions own = options;
    own.engine.communicator = &ranks;
    out[static_cast<std::size_t>(ranks.rank())] = train(make(), config, own);
  });
  return out;
}

// Losses are each rank's own.
inline void expect_same_states(const FinalState& expected, FinalState actual) {
  actual.losses = expected.losses;
  expect_same_bits(expected, actual);
}

}  // namespace spillway::test
