// SPDX-License-Identifier: Apache-2.0
#include "spillway/device/event.h"

#include <mutex>
#include <utility>
#include <vector>

namespace spillway {

struct Event::Shared {
  explicit Shared(std::shared_ptr<StreamDevice> owner) : device(std::move(owner)) {}
  ~Shared() {
    for (void* event : idle) device->destroy_event(event);
  }

  const std::shared_ptr<StreamDevice> device;
  std::mutex mutex;
  std::vector<void*> idle;
  int made = 0;

  // Room for every event: giving one back allocates nothing.
  void make_one() {
    idle.reserve(static_cast<std::size_t>(made) + 1);
    idle.push_back(device->make_event());
    ++made;
  }
};

Event::Event(Event&& other) noexcept
    : shared_(std::move(other.shared_)), event_(std::exchange(other.event_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  if (this != &other) {
    give_back();
    shared_ = std::move(other.shared_);
    event_ = std::exchange(other.event_, nullptr);
  }
  return *this;
}

Event::~Event() {
  give_back();
}

void Event::give_back() noexcept {
  if (event_ == nullptr) return;
  {
    const std::scoped_lock lock(shared_->mutex);
    shared_->idle.push_back(std::exchange(event_, nullptr));
  }
  shared_.reset();
}

void Event::wait() const {
  if (event_ != nullptr) shared_->device->wait_event(event_);
}

bool Event::passed() const {
  return event_ == nullptr || shared_->device->passed(event_);
}

void Event::order_before(StreamRef stream) const {
  if (event_ != nullptr) shared_->device->order_after(stream, event_);
}

EventPool::EventPool(std::shared_ptr<StreamDevice> device, int count)
    : shared_(std::make_shared<Event::Shared>(std::move(device))) {
  for (int i = 0; i < count; ++i) shared_->make_one();
}

StreamDevice& EventPool::device() const {
  return *shared_->device;
}

Event EventPool::record(StreamRef stream) {
  Event taken;
  {
    const std::scoped_lock lock(shared_->mutex);
    if (shared_->idle.empty()) shared_->make_one();
    taken.event_ = shared_->idle.back();
    shared_->idle.pop_back();
  }
  taken.shared_ = shared_;
  shared_->device->record(taken.event_, stream);
  return taken;
}

int EventPool::made() const {
  const std::scoped_lock lock(shared_->mutex);
  return shared_->made;
}

int EventPool::idle() const {
  const std::scoped_lock lock(shared_->mutex);
  return static_cast<int>(shared_->idle.size());
}

}  // namespace spillway
