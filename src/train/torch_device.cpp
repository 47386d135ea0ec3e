// SPDX-License-Identifier: Apache-2.0
#include "train/torch_device.h"

namespace spillway {

torch::Device torch_device(const DeviceConfig& config) {
  if (config.kind == DeviceConfig::Kind::emulated) return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(config.ordinal)};
}

void move_buffers(const std::vector<torch::Tensor>& buffers, torch::Device device) {
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& buffer : buffers) {
    if (buffer.defined() && buffer.device() != device) buffer.set_data(buffer.detach().to(device));
  }
}

}  // namespace spillway
