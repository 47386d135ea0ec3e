// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/thread_team.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "lane/affinity.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// Looks at a value before a thread sleeps for its change: a few ten microseconds, about what it costs to be woken. Only
// for threads that have a core each; others would keep each other from running.
constexpr int kLooks = 2000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Blocks: until `value` is no longer `old`.
void wait_for_change(const std::atomic<int>& value, int old, int looks) {
  for (int i = 0; i < looks; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

struct ThreadTeam::Impl {
  std::vector<int> cores;
  std::atomic<int> round{0};    // counts parallel_for calls: a worker runs once a round
  std::atomic<int> running{0};  // workers that have not finished the round
  std::atomic<bool> ending{false};
  std::int64_t count = 0;
  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
  std::mutex error_mutex;
  std::exception_ptr error;
  std::thread::id caller;  // who was moved to the first core
  std::vector<std::thread> workers;

  int threads() const { return static_cast<int>(workers.size()) + 1; }
  int looks() const { return cores.empty() ? 0 : kLooks; }

  void run_slice(int member) {
    const std::int64_t begin = count * member / threads(), end = count * (member + 1) / threads();
    if (begin == end) return;
    try {
      (*body)(begin, end);
    } catch (...) {
      const std::scoped_lock lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void work(int member) {
    if (!cores.empty()) stay_on(cores[static_cast<std::size_t>(member)]);
    for (int seen = 0;; ++seen) {
      wait_for_change(round, seen, looks());
      if (ending.load(std::memory_order_acquire)) return;
      run_slice(member);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }

  void begin_round() {
    round.fetch_add(1, std::memory_order_release);
    round.notify_all();
  }

  void start(int threads) {
    workers.reserve(static_cast<std::size_t>(threads) - 1);
    try {
      for (int member = 1; member < threads; ++member) workers.emplace_back([this, member] { work(member); });
    } catch (const std::exception& error) {
      const std::size_t started = workers.size();
      end();
      throw Error(
          fmt::format("a team of {} threads was asked for, of which the system started {} ({}); expected all: "
                      "raise the limit of processes (ulimit -u, or a container's), or ask for fewer threads",
                      threads, started + 1, error.what()));
    }
  }

  void end() {
    ending.store(true, std::memory_order_release);
    begin_round();
    for (std::thread& worker : workers) worker.join();
  }

  void move_caller() {
    if (cores.empty() || caller == std::this_thread::get_id()) return;
    stay_on(cores[0]);
    caller = std::this_thread::get_id();
  }
};

namespace {

void check_cores(int threads, const std::vector<int>& cores) {
  require(threads >= 1, "a thread team needs at least one thread");
  if (cores.empty()) return;
  require(static_cast<int>(cores.size()) == threads,
          fmt::format("{} cores were given for {} threads; each needs one", cores.size(), threads));
  const std::vector<int> allowed = allowed_processors();
  for (int core : cores) {
    require(allowed.empty() || std::ranges::binary_search(allowed, core),
            fmt::format("processor {} is not among those that this thread may use", core));
  }
}

}  // namespace

ThreadTeam::ThreadTeam(int threads, std::vector<int> cores) : impl_(std::make_unique<Impl>()) {
  check_cores(threads, cores);
  impl_->cores = std::move(cores);
  impl_->start(threads);
}

ThreadTeam::~ThreadTeam() {
  impl_->end();
}

int ThreadTeam::threads() const {
  return impl_->threads();
}

void ThreadTeam::parallel_for(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  impl_->move_caller();
  impl_->count = count;
  impl_->body = &body;
  impl_->error = nullptr;
  impl_->running.store(static_cast<int>(impl_->workers.size()), std::memory_order_relaxed);
  impl_->begin_round();
  impl_->run_slice(0);
  for (int left = impl_->running.load(std::memory_order_acquire); left != 0;
       left = impl_->running.load(std::memory_order_acquire)) {
    wait_for_change(impl_->running, left, impl_->looks());
  }
  if (impl_->error) std::rethrow_exception(impl_->error);
}

}  // namespace spillway
