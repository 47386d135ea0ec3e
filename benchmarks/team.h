// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <barrier>
#include <functional>
#include <thread>
#include <vector>

namespace spillway::bench {

/// Threads that wait for work between calls, so that a measurement does not pay for starting them.
class Team {
 public:
  explicit Team(int size) : start_(size), done_(size) {
    for (int i = 1; i < size; ++i) workers_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    work_ = nullptr;
    start_.arrive_and_wait();
    for (std::thread& worker : workers_) worker.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls work(i) for each i below size(), one thread each; the caller's own is 0. Blocks: until all are done.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    start_.arrive_and_wait();
    work(0);
    done_.arrive_and_wait();
  }

 private:
  void serve(int index) {
    for (;;) {
      start_.arrive_and_wait();
      if (work_ == nullptr) return;
      (*work_)(index);
      done_.arrive_and_wait();
    }
  }

  std::barrier<> start_, done_;
  const std::function<void(int)>* work_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace spillway::bench
