// SPDX-License-Identifier: Apache-2.0
#include "support/thread_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "spillway/core/error.h"

namespace spillway::test {
namespace {

// A point in a stream's order.
struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  bool past = false;

  void come() {
    {
      const std::scoped_lock lock(mutex);
      past = true;
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return past; });
  }
};

struct FakeEvent {
  std::mutex mutex;
  std::shared_ptr<Moment> moment;

  std::shared_ptr<Moment> now() {
    const std::scoped_lock lock(mutex);
    return moment;
  }
};

class Stream {
 public:
  Stream() : worker_([this] { work(); }) {}
  ~Stream() {
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    changed_.notify_one();
    worker_.join();
  }
  void give(std::function<void()> work) {
    {
      const std::scoped_lock lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      next();
      next = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ending_ = false;
  std::thread worker_;
};

}  // namespace

struct ThreadDevice::Impl {
  struct Range {
    const std::byte* shown;
    std::byte* real;
    std::size_t size;
  };

  mutable std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<Range> ranges;
  std::function<void()> delay;
  std::exception_ptr error;
  int entered = 0, events = 0;

  static Stream& stream(StreamRef ref) {
    check(ref.native() != nullptr, "work for a device names a stream");
    return *static_cast<Stream*>(ref.native());
  }
  void throw_error() const {
    const std::scoped_lock lock(mutex);
    if (error) std::rethrow_exception(error);
  }
  bool failed() const {
    const std::scoped_lock lock(mutex);
    return error != nullptr;
  }
  void run(const std::function<void()>& work) {
    std::function<void()> late;
    {
      const std::scoped_lock lock(mutex);
      if (error) return;
      late = delay;
    }
    try {
      if (late) late();
      work();
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (!error) error = std::current_exception();
    }
  }
};

namespace {

// The shown half is reserved address space without access; the real half is ordinary memory.
class ThreadArena final : public Arena {
 public:
  ThreadArena(Bytes size, const std::function<void(std::byte* shown, std::byte* real)>& made,
              std::function<void(std::byte* shown)> gone)
      : size_(static_cast<std::size_t>(size.value)), gone_(std::move(gone)) {
    if (size_ == 0) return;
    shown_ = map(PROT_NONE);
    real_ = map(PROT_READ | PROT_WRITE);
    std::memset(real_, 0xff, size_);  // what was there before: NaNs
    made(shown_, real_);
  }
  ~ThreadArena() override {
    if (size_ == 0) return;
    gone_(shown_);
    munmap(shown_, size_);
    munmap(real_, size_);
  }
  std::byte* base() const override { return shown_; }

 private:
  std::byte* map(int access) const {
    void* memory = mmap(nullptr, size_, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(memory != MAP_FAILED, "there is memory for an imitated device");
    return static_cast<std::byte*>(memory);
  }

  const std::size_t size_;
  const std::function<void(std::byte*)> gone_;
  std::byte *shown_ = nullptr, *real_ = nullptr;
};

}  // namespace

ThreadDevice::ThreadDevice() : impl_(std::make_unique<Impl>()) {}
ThreadDevice::~ThreadDevice() = default;

StreamRef ThreadDevice::make_stream() {
  const std::scoped_lock lock(impl_->mutex);
  return StreamRef(impl_->streams.emplace_back(std::make_unique<Stream>()).get());
}

void ThreadDevice::enqueue(StreamRef stream, std::function<void()> work) {
  impl_->throw_error();
  Impl::stream(stream).give([impl = impl_.get(), work = std::move(work)] { impl->run(work); });
}

void ThreadDevice::set_delay(std::function<void()> delay) {
  const std::scoped_lock lock(impl_->mutex);
  impl_->delay = std::move(delay);
}

void ThreadDevice::drain(StreamRef stream) {
  const auto moment = std::make_shared<Moment>();
  Impl::stream(stream).give([moment] { moment->come(); });
  moment->wait();
}

int ThreadDevice::threads_entered() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->entered;
}

int ThreadDevice::events_alive() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->events;
}

std::unique_ptr<Arena> ThreadDevice::make_arena(Bytes size) {
  Impl* const impl = impl_.get();
  return std::make_unique<ThreadArena>(
      size,
      [&](std::byte* shown, std::byte* real) {
        const std::scoped_lock lock(impl->mutex);
        impl->ranges.push_back({shown, real, static_cast<std::size_t>(size.value)});
      },
      [impl](std::byte* shown) {
        const std::scoped_lock lock(impl->mutex);
        std::erase_if(impl->ranges, [&](const Impl::Range& range) { return range.shown == shown; });
      });
}

const void* ThreadDevice::translate(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  const std::scoped_lock lock(impl_->mutex);
  for (const Impl::Range& range : impl_->ranges) {
    if (at >= range.shown && at < range.shown + range.size) return range.real + (at - range.shown);
  }
  return address;
}

void ThreadDevice::enter_thread() {
  const std::scoped_lock lock(impl_->mutex);
  ++impl_->entered;
}

void* ThreadDevice::make_event() {
  const std::scoped_lock lock(impl_->mutex);
  ++impl_->events;
  return new FakeEvent;
}

void ThreadDevice::destroy_event(void* event) noexcept {
  delete static_cast<FakeEvent*>(event);
  const std::scoped_lock lock(impl_->mutex);
  --impl_->events;
}

void ThreadDevice::record(void* event, StreamRef stream) {
  impl_->throw_error();
  auto* fake = static_cast<FakeEvent*>(event);
  const auto moment = std::make_shared<Moment>();
  {
    const std::scoped_lock lock(fake->mutex);
    fake->moment = moment;
  }
  Impl::stream(stream).give([moment] { moment->come(); });
}

void ThreadDevice::wait_event(void* event) {
  if (const auto moment = static_cast<FakeEvent*>(event)->now()) moment->wait();
  impl_->throw_error();
}

bool ThreadDevice::passed(void* event) {
  const auto moment = static_cast<FakeEvent*>(event)->now();
  if (moment == nullptr || impl_->failed()) return true;
  const std::scoped_lock lock(moment->mutex);
  return moment->past;
}

void ThreadDevice::order_after(StreamRef stream, void* event) {
  impl_->throw_error();
  const auto moment = static_cast<FakeEvent*>(event)->now();
  if (moment != nullptr) Impl::stream(stream).give([moment] { moment->wait(); });
}

}  // namespace spillway::test
