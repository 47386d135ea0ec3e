// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace spillway {

/// Draws a model's dropout masks from a generator of its own, made on the device where it is first used.
class DropoutGenerator {
 public:
  /// Zeroes elements of `x` with `probability` and scales the others up, where `training`; else returns `x`.
  torch::Tensor apply(const torch::Tensor& x, double probability, bool training);

  void set_seed(std::uint64_t seed);
  torch::Tensor state(torch::Device device);
  /// Throws: InvalidArgument where `state` is not one of a generator on `device`.
  void set_state(torch::Device device, const torch::Tensor& state);

 private:
  at::Generator& on(torch::Device device);

  std::uint64_t seed_ = 0;
  at::Generator generator_;
};

}  // namespace spillway
