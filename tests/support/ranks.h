// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "spillway/comm/transports.h"

namespace spillway::test {

/// What each rank's body threw, empty where nothing.
using RankErrors = std::vector<std::string>;

/// Runs body(communicator) on a thread a rank. A communicator is destroyed on its thread, by an exception where the
/// body threw. Blocks: until all are done.
inline RankErrors run_ranks(int size, const std::function<void(Communicator&)>& body, CommOptions options = {}) {
  auto ranks = make_thread_ranks(size, options);
  RankErrors errors(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&body, &error = errors[rank], comm = std::move(ranks[rank])]() mutable {
      try {
        const std::unique_ptr<Communicator> mine = std::move(comm);
        body(*mine);
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace spillway::test
