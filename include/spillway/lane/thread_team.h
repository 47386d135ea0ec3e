// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace spillway {

/// A fixed set of threads that share one loop at a time. Slices are contiguous and depend on the number of threads
/// alone; kernels are such that slices change no bit.
class ThreadTeam {
 public:
  /// `threads` counts the caller of parallel_for: one makes no thread at all. Throws: InvalidArgument below one,
  /// Error where the system does not start them all.
  explicit ThreadTeam(int threads) : ThreadTeam(threads, {}) {}
  /// Threads that stay on processors `cores`, one each, and wait for a moment awake before they sleep. The thread that
  /// calls parallel_for is the first of them: it is moved at its first call, for good. None given: threads run
  /// anywhere. Throws: InvalidArgument below one thread, where `cores` are not as many as threads, or where one may not
  /// be used; Error where the system does not start them all.
  ThreadTeam(int threads, std::vector<int> cores);
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
