// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "device/cuda_api.h"
#include "kernels/cuda_kernels.h"
#include "memory/cuda_arena.h"
#include "runtime/stream_machine.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

using kernels::Element;

class CudaWork final : public DeviceWork {
 public:
  void copy(StreamRef stream, void* to, const void* from, Bytes bytes) const override {
    copy_async(stream, to, from, bytes);
  }
  void zero(StreamRef stream, void* to, Bytes bytes) const override { cuda::zero(stream, to, bytes); }
  void widen(StreamRef stream, float* target, const void* source, Element type, std::int64_t count) const override {
    cuda::check_code(kernels::cuda::widen(stream.native(), target, source, type, count), "widening");
  }
  void accumulate(StreamRef stream, void* sum, Element sum_type, const void* source, Element type,
                  std::int64_t count) const override {
    cuda::check_code(kernels::cuda::accumulate(stream.native(), sum, sum_type, source, type, count), "accumulating");
  }
  void narrow(StreamRef stream, void* target, Element type, const float* source, std::int64_t count) const override {
    cuda::check_code(kernels::cuda::narrow(stream.native(), target, type, source, count), "narrowing");
  }
  void grain_square_sums(StreamRef stream, double* sums, const void* values, Element type,
                         std::int64_t count) const override {
    cuda::check_code(kernels::cuda::grain_square_sums(stream.native(), sums, values, type, count), "summing squares");
  }
  void adam(StreamRef stream, const kernels::AdamScalars& scalars, float* p, float* m, float* v, const void* g,
            Element g_type, void* copy, Element copy_type, std::int64_t count) const override {
    cuda::check_code(kernels::cuda::adam(stream.native(), scalars, p, m, v, g, g_type, copy, copy_type, count), "Adam");
  }
  void sgd(StreamRef stream, const kernels::SgdScalars& scalars, float* p, float* b, const void* g, Element g_type,
           void* copy, Element copy_type, std::int64_t count) const override {
    cuda::check_code(kernels::cuda::sgd(stream.native(), scalars, p, b, g, g_type, copy, copy_type, count), "SGD");
  }
  void adagrad(StreamRef stream, const kernels::AdagradScalars& scalars, float* p, float* h, const void* g,
               Element g_type, void* copy, Element copy_type, std::int64_t count) const override {
    cuda::check_code(kernels::cuda::adagrad(stream.native(), scalars, p, h, g, g_type, copy, copy_type, count),
                     "Adagrad");
  }
  void lion(StreamRef stream, const kernels::LionScalars& scalars, float* p, float* m, const void* g, Element g_type,
            void* copy, Element copy_type, std::int64_t count) const override {
    cuda::check_code(kernels::cuda::lion(stream.native(), scalars, p, m, g, g_type, copy, copy_type, count), "Lion");
  }
};

std::unique_ptr<Arena> make_arena(int ordinal, Tier tier, Bytes size) {
  switch (tier) {
    case Tier::device:
      return cuda::make_device_arena(ordinal, size);
    case Tier::pinned:
      return cuda::make_pinned_arena(ordinal, size);
    default:
      return make_host_arena(size);
  }
}

// The stream that a framework named, by the name that is never null; the machine's own where there is no framework.
CurrentStream current_stream(const MachineOptions& options, StreamRef own) {
  if (!options.current_stream) return [own] { return own; };
  return [ask = options.current_stream] { return cuda::named_stream(ask().native()); };
}

}  // namespace

std::unique_ptr<Machine> make_cuda_machine(const MachineOptions& options) {
  require(options.device.kind == DeviceConfig::Kind::cuda, "the CUDA machine was asked for another device");
  require(options.device.upload_bandwidth == 0 && options.device.download_bandwidth == 0 &&
              options.device.latency.value == 0 && options.device.compute_rate == 0,
          "link bandwidths, latency and compute rate model the emulated device: leave them out for device cuda");
  const int ordinal = options.device.ordinal;
  const GpuInfo gpu = find_gpu(ordinal);
  const Bytes capacity = options.device.memory.value_or(gpu.free);
  if (capacity > gpu.memory) {
    throw OutOfMemory(fmt::format("device.memory is {}, but GPU {} ({}) has {}", to_string(capacity), ordinal, gpu.name,
                                  to_string(gpu.memory)),
                      capacity.value, (capacity - gpu.memory).value);
  }
  StreamMachineParts parts;
  const std::shared_ptr<cuda::CudaDevice> device = cuda::make_cuda_device(ordinal);
  parts.device = device;
  parts.upload = device->make_stream();
  parts.download = device->make_stream();
  if (options.communicator != nullptr) parts.network = device->make_stream();
  parts.current = current_stream(options, device->make_stream());
  parts.work = std::make_unique<CudaWork>();
  parts.make_arena = [ordinal](Tier tier, Bytes size) { return make_arena(ordinal, tier, size); };
  parts.capacity = capacity;
  device->enter_thread();  // the thread that makes the machine is the one that gives compute
  return make_stream_machine(options, std::move(parts));
}

}  // namespace spillway
