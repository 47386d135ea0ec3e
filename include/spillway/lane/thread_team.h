// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace spillway {

/// A fixed set of threads that share one loop at a time. Slices are contiguous and depend on the number of threads
/// alone; kernels are such that slices change no bit.
class ThreadTeam {
 public:
  /// `threads` counts the caller of parallel_for: one makes no thread at all. Throws: InvalidArgument below one.
  explicit ThreadTeam(int threads);
  /// Ends the threads.
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int threads() const;

  /// Calls body(begin, end) for slices that cover [0, count), on the team and the caller. Blocks: until all are done.
  /// Throws: the first exception of a slice, after all have ended. Allocates nothing.
  /// Threads: one caller at a time.
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
