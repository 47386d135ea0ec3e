// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/device/device.h"

namespace spillway {

/// What lanes need of a device that works off streams by itself: points in the order of a stream, which the host or
/// another stream waits for. Implemented by CUDA, and in tests by threads.
/// Threads: safe.
class StreamDevice {
 public:
  virtual ~StreamDevice() = default;

  /// Makes this the device of the calling thread.
  virtual void enter_thread() = 0;

  /// An event is a name until it is recorded; recorded again, it stands for the new point alone.
  virtual void* make_event() = 0;
  virtual void destroy_event(void* event) noexcept = 0;
  virtual void record(void* event, StreamRef stream) = 0;
  /// Blocks: the host, until the device has come past the event. Throws: DeviceError for what went wrong before it.
  virtual void wait_event(void* event) = 0;
  /// Whether it has, or has failed.
  virtual bool passed(void* event) = 0;
  /// What is given to `stream` from now on runs after the point that `event` stands for now.
  virtual void order_after(StreamRef stream, void* event) = 0;
};

/// A point in the order of a stream, from a pool. Empty when default-made.
/// Owns: its event, which goes back to the pool with it. Threads: safe but for assignment.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  ~Event();

  explicit operator bool() const { return event_ != nullptr; }
  /// As StreamDevice.
  void wait() const;
  bool passed() const;
  void order_before(StreamRef stream) const;

 private:
  friend class EventPool;
  struct Shared;  // the pool's, alive as long as one of its events
  void give_back() noexcept;

  std::shared_ptr<Shared> shared_;
  void* event_ = nullptr;
};

/// Events made up front, so that a step makes none: the number in use is that of the tickets somebody holds, which has
/// a bound. Beyond what it was made with a pool grows, once for each new maximum. Owns: its events, also those that
/// outlive it. Threads: safe.
class EventPool {
 public:
  EventPool(std::shared_ptr<StreamDevice> device, int count);

  StreamDevice& device() const;
  /// The present end of `stream`.
  Event record(StreamRef stream);
  int made() const;
  int idle() const;

 private:
  std::shared_ptr<Event::Shared> shared_;
};

}  // namespace spillway
