// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "lane/op_runner.h"
#include "spillway/core/error.h"
#include "spillway/lane/lane.h"
#include "spillway/lane/stream_lane.h"

namespace spillway {
namespace {

class ThreadLane final : public Lane {
 public:
  /// `events` with a stream, or neither. `device`: that of the events which its ops wait for; null where there is none.
  ThreadLane(std::string name, LinkModel link, LaneContext context, StreamRef stream, EventPool* events,
             StreamDevice* device)
      : Lane(name), stream_(stream), device_(device), runner_(name, link, std::move(context), events) {
    try {
      worker_ = std::thread([this] { work(); });
    } catch (const std::exception& error) {
      throw Error(
          fmt::format("the system started no thread for the lane \"{}\" ({}); expected one: raise the limit of "
                      "processes (ulimit -u, or a container's), or run fewer threads",
                      name, error.what()));
    }
  }

  ~ThreadLane() override {
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    changed_.notify_one();
    worker_.join();
  }

  Ticket submit(Op op) override {
    TicketPromise promise;
    const Ticket ticket = promise.ticket();
    {
      const std::scoped_lock lock(mutex_);
      queue_.emplace_back(std::move(op), std::move(promise));
    }
    changed_.notify_one();
    return ticket;
  }

 private:
  void work() {
    std::exception_ptr unusable = enter_device();
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::pair<Op, TicketPromise> next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (unusable) next.first.body = [unusable](StreamRef) { std::rethrow_exception(unusable); };
      runner_.run(next.first, next.second, stream_);
      next = {};  // what the body holds is let go before the lane waits again
      lock.lock();
    }
  }

  // What keeps this thread from using its lane's device: then every op fails with it.
  std::exception_ptr enter_device() const noexcept {
    try {
      if (device_ != nullptr) device_->enter_thread();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  const StreamRef stream_;
  StreamDevice* const device_;
  OpRunner runner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Op, TicketPromise>> queue_;
  bool ending_ = false;
  std::thread worker_;
};

}  // namespace

std::unique_ptr<Lane> make_thread_lane(std::string name, LinkModel link, LaneContext context) {
  return std::make_unique<ThreadLane>(std::move(name), link, std::move(context), StreamRef(), nullptr, nullptr);
}

std::unique_ptr<Lane> make_host_lane(std::string name, StreamDevice& device, LaneContext context) {
  return std::make_unique<ThreadLane>(std::move(name), LinkModel{}, std::move(context), StreamRef(), nullptr, &device);
}

std::unique_ptr<Lane> make_stream_lane(std::string name, StreamRef stream, EventPool& events, LaneContext context) {
  return std::make_unique<ThreadLane>(std::move(name), LinkModel{}, std::move(context), stream, &events,
                                      &events.device());
}

}  // namespace spillway
