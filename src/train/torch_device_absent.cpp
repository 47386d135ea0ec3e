// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/error.h"
#include "spillway/device/gpu.h"
#include "train/torch_device.h"

namespace spillway {

void check_torch_device(const DeviceConfig& config) {
  if (config.kind == DeviceConfig::Kind::emulated) return;
  static_cast<void>(find_gpu(config.ordinal));  // throws in a build without CUDA
  throw InvalidArgument(
      "device cuda was asked for, but this LibTorch is one without CUDA: use one with, or the emulated device");
}

std::function<StreamRef()> torch_stream(const DeviceConfig&) {
  return {};
}

TorchDeviceScope::TorchDeviceScope(const DeviceConfig&) {}
TorchDeviceScope::~TorchDeviceScope() = default;

void cap_torch_memory(const DeviceConfig&, const MemoryLedger&) {}
void lift_torch_cap(const DeviceConfig&) {}
void empty_torch_cache(const DeviceConfig&) {}

Bytes torch_memory_peak(const DeviceConfig&) {
  return {};
}

void reset_torch_memory_peak(const DeviceConfig&) {}

}  // namespace spillway
