// SPDX-License-Identifier: Apache-2.0
#include "support/thread_machine.h"

#include <cstring>
#include <utility>

#include "runtime/stream_machine.h"

namespace spillway::test {
namespace {

using kernels::Element;

// The processor's kernels, run by the stream's thread on the memory behind the device's addresses.
class ThreadWork final : public DeviceWork {
 public:
  explicit ThreadWork(ThreadDevice& device) : device_(device) {}

  void copy(StreamRef stream, void* to, const void* from, Bytes bytes) const override {
    give(stream, [=, this] { cpu_work().copy({}, real(to), real(from), bytes); });
  }
  void zero(StreamRef stream, void* to, Bytes bytes) const override {
    give(stream, [=, this] { cpu_work().zero({}, real(to), bytes); });
  }
  void widen(StreamRef stream, float* target, const void* source, Element type, std::int64_t count) const override {
    give(stream, [=, this] { cpu_work().widen({}, real(target), real(source), type, count); });
  }
  void accumulate(StreamRef stream, void* sum, Element sum_type, const void* source, Element type,
                  std::int64_t count) const override {
    give(stream, [=, this] { cpu_work().accumulate({}, real(sum), sum_type, real(source), type, count); });
  }
  void narrow(StreamRef stream, void* target, Element type, const float* source, std::int64_t count) const override {
    give(stream, [=, this] { cpu_work().narrow({}, real(target), type, real(source), count); });
  }
  void grain_square_sums(StreamRef stream, double* sums, const void* values, Element type,
                         std::int64_t count) const override {
    give(stream, [=, this] { cpu_work().grain_square_sums({}, real(sums), real(values), type, count); });
  }
  void adam(StreamRef stream, const kernels::AdamScalars& scalars, float* p, float* m, float* v, const void* g,
            Element g_type, void* copy, Element copy_type, std::int64_t count) const override {
    give(stream, [=, this] {
      cpu_work().adam({}, scalars, real(p), real(m), real(v), real(g), g_type, real(copy), copy_type, count);
    });
  }
  void sgd(StreamRef stream, const kernels::SgdScalars& scalars, float* p, float* b, const void* g, Element g_type,
           void* copy, Element copy_type, std::int64_t count) const override {
    give(stream,
         [=, this] { cpu_work().sgd({}, scalars, real(p), real(b), real(g), g_type, real(copy), copy_type, count); });
  }
  void adagrad(StreamRef stream, const kernels::AdagradScalars& scalars, float* p, float* h, const void* g,
               Element g_type, void* copy, Element copy_type, std::int64_t count) const override {
    give(stream, [=, this] {
      cpu_work().adagrad({}, scalars, real(p), real(h), real(g), g_type, real(copy), copy_type, count);
    });
  }
  void lion(StreamRef stream, const kernels::LionScalars& scalars, float* p, float* m, const void* g, Element g_type,
            void* copy, Element copy_type, std::int64_t count) const override {
    give(stream,
         [=, this] { cpu_work().lion({}, scalars, real(p), real(m), real(g), g_type, real(copy), copy_type, count); });
  }

 private:
  void give(StreamRef stream, std::function<void()> work) const { device_.enqueue(stream, std::move(work)); }
  template <class T>
  T* real(T* address) const {
    return device_.real(address);
  }

  ThreadDevice& device_;
};

}  // namespace

std::unique_ptr<Machine> make_thread_machine(const MachineOptions& options, std::function<void()> delay) {
  const auto device = std::make_shared<ThreadDevice>();
  device->set_delay(std::move(delay));
  StreamMachineParts parts;
  parts.upload = device->make_stream();
  parts.download = device->make_stream();
  parts.current = options.current_stream;
  if (!parts.current) parts.current = [stream = device->make_stream()] { return stream; };
  parts.work = std::make_unique<ThreadWork>(*device);
  parts.make_arena = [owner = device.get()](Tier tier, Bytes size) {
    return tier == Tier::device ? owner->make_arena(size) : make_host_arena(size);
  };
  parts.capacity = options.device.memory.value_or(Bytes{-1});
  parts.device = device;
  return make_stream_machine(options, std::move(parts));
}

}  // namespace spillway::test
