// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/thread_team.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {

struct ThreadTeam::Impl {
  std::mutex mutex;
  std::condition_variable start, finish;
  std::int64_t round = 0;  // counts parallel_for calls: a worker runs once a round
  int running = 0;
  bool ending = false;
  std::int64_t count = 0;
  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
  std::exception_ptr error;
  std::vector<std::thread> workers;

  int threads() const { return static_cast<int>(workers.size()) + 1; }

  void run_slice(int member) {
    const std::int64_t begin = count * member / threads(), end = count * (member + 1) / threads();
    if (begin == end) return;
    try {
      (*body)(begin, end);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (!error) error = std::current_exception();
    }
  }

  void work(int member) {
    std::int64_t seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      start.wait(lock, [&] { return ending || round != seen; });
      if (ending) return;
      seen = round;
      lock.unlock();
      run_slice(member);
      lock.lock();
      if (--running == 0) finish.notify_one();
    }
  }
};

ThreadTeam::ThreadTeam(int threads) : impl_(std::make_unique<Impl>()) {
  require(threads >= 1, "a thread team needs at least one thread");
  impl_->workers.resize(static_cast<std::size_t>(threads) - 1);
  for (std::size_t i = 0; i < impl_->workers.size(); ++i) {
    impl_->workers[i] = std::thread([this, i] { impl_->work(static_cast<int>(i) + 1); });
  }
}

ThreadTeam::~ThreadTeam() {
  {
    const std::scoped_lock lock(impl_->mutex);
    impl_->ending = true;
  }
  impl_->start.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadTeam::threads() const {
  return impl_->threads();
}

void ThreadTeam::parallel_for(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  {
    const std::scoped_lock lock(impl_->mutex);
    impl_->count = count;
    impl_->body = &body;
    impl_->error = nullptr;
    impl_->running = static_cast<int>(impl_->workers.size());
    ++impl_->round;
  }
  impl_->start.notify_all();
  impl_->run_slice(0);
  std::unique_lock lock(impl_->mutex);
  impl_->finish.wait(lock, [&] { return impl_->running == 0; });
  if (impl_->error) std::rethrow_exception(impl_->error);
}

}  // namespace spillway
