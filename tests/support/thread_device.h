// SPDX-License-Identifier: Apache-2.0
#pragma once

// A device made of threads: each stream is a thread that works off what it was given, in order; events are CUDA's. So
// lanes, tickets and schedules of devices with streams are tested without a GPU, by sanitizers too.
//
// Its memory has addresses that no one may touch: the host that reads device memory by mistake crashes. Work given to a
// stream translates them.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "spillway/device/event.h"
#include "spillway/memory/pool.h"

namespace spillway::test {

class ThreadDevice final : public StreamDevice {
 public:
  ThreadDevice();
  ~ThreadDevice() override;

  StreamRef make_stream();
  /// Gives a stream work. An error of it fails every later event of the device, as CUDA's errors do.
  void enqueue(StreamRef stream, std::function<void()> work);
  /// Called before each piece of work, on the stream's thread; sleeping in it makes streams late.
  void set_delay(std::function<void()> delay);
  /// Blocks: until the stream has nothing left.
  void drain(StreamRef stream);
  int threads_entered() const;
  int events_alive() const;

  /// Memory of the device, behind addresses of its own. The device must outlive it.
  std::unique_ptr<Arena> make_arena(Bytes size);
  /// The memory behind an address; host addresses stay as they are.
  template <class T>
  T* real(T* address) const {
    return const_cast<T*>(static_cast<const T*>(translate(address)));
  }

  void enter_thread() override;
  void* make_event() override;
  void destroy_event(void* event) noexcept override;
  void record(void* event, StreamRef stream) override;
  void wait_event(void* event) override;
  bool passed(void* event) override;
  void order_after(StreamRef stream, void* event) override;

 private:
  const void* translate(const void* address) const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway::test
