// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "spillway/core/error.h"
#include "spillway/device/gpu.h"
#include "train/torch_device.h"

namespace spillway {
namespace {

bool on_gpu(const DeviceConfig& config) {
  return config.kind == DeviceConfig::Kind::cuda;
}

c10::DeviceIndex index_of(const DeviceConfig& config) {
  return static_cast<c10::DeviceIndex>(config.ordinal);
}

}  // namespace

void check_torch_device(const DeviceConfig& config) {
  if (!on_gpu(config)) return;
  static_cast<void>(find_gpu(config.ordinal));
  require(torch::cuda::is_available(),
          "device cuda was asked for, but there is no usable GPU for LibTorch. Use the emulated device");
  torch::zeros({1}, torch_device(config));  // LibTorch sets its side of the GPU up with the first tensor
  empty_torch_cache(config);                // what it keeps of former work would count as used
}

std::function<StreamRef()> torch_stream(const DeviceConfig& config) {
  if (!on_gpu(config)) return {};
  return [index = index_of(config)] { return StreamRef(c10::cuda::getCurrentCUDAStream(index).stream()); };
}

TorchDeviceScope::TorchDeviceScope(const DeviceConfig& config) {
  if (!on_gpu(config)) return;
  before_ = c10::cuda::current_device();
  c10::cuda::set_device(index_of(config));
}

TorchDeviceScope::~TorchDeviceScope() {
  if (before_ < 0) return;
  try {
    // Puts it back at its next use where this process has not used it: until then it takes no memory there.
    static_cast<void>(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(before_)));
  } catch (const std::exception&) {  // a GPU that fails here has failed before, where it was reported
  }
}

void cap_torch_memory(const DeviceConfig& config, const MemoryLedger& ledger) {
  if (!on_gpu(config) || !ledger.limited()) return;
  const auto total = static_cast<double>(find_gpu(config.ordinal).memory.value);
  const auto left = static_cast<double>((ledger.capacity() - ledger.used().total()).value);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(std::clamp(left / total, 0.0, 1.0), index_of(config));
}

void lift_torch_cap(const DeviceConfig& config) {
  if (!on_gpu(config)) return;
  c10::cuda::CUDACachingAllocator::setMemoryFraction(1.0, index_of(config));
  c10::cuda::CUDACachingAllocator::emptyCache();
}

void empty_torch_cache(const DeviceConfig& config) {
  if (on_gpu(config)) c10::cuda::CUDACachingAllocator::emptyCache();
}

Bytes torch_memory_peak(const DeviceConfig& config) {
  if (!on_gpu(config)) return {};
  // The first entry sums small and large pieces up.
  return {c10::cuda::CUDACachingAllocator::getDeviceStats(index_of(config)).allocated_bytes[0].peak};
}

void reset_torch_memory_peak(const DeviceConfig& config) {
  if (on_gpu(config)) c10::cuda::CUDACachingAllocator::resetPeakStats(index_of(config));
}

}  // namespace spillway
