// SPDX-License-Identifier: Apache-2.0
#pragma once

// A second statement of the numerics contract, one element at a time, written from docs/numerics.md alone: it shares no
// line with the kernels. Conversions go through exact double arithmetic instead of bit tricks.

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu_kernels.h"

namespace spillway::test {

/// What a user chooses; each optimizer reads its own.
struct Hyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  double momentum = 0.9, dampening = 0, lr_decay = 0;
  bool nesterov = false;
};

float widen_reference(std::uint16_t value, kernels::Element type);
std::uint16_t narrow_reference(float value, kernels::Element type);

/// One optimizer: its kernel and its reference behind one signature. States that it does not have are not touched.
struct Optimizer {
  const char* name;
  std::vector<kernels::StateKind> states;

  using Kernel = void (*)(const kernels::CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor, float* p,
                          float* s0, float* s1, const void* g, kernels::Element g_type, void* copy,
                          kernels::Element copy_type, std::int64_t count);
  using Packed = void (*)(const kernels::CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor,
                          const kernels::UpdateArrays& arrays);
  using Reference = void (*)(const Hyper& hyper, std::int64_t step, float factor, std::span<float> p,
                             std::span<float> s0, std::span<float> s1, std::span<const float> g);
  Kernel kernel;
  Packed packed;
  Reference reference;
};

/// adamw, adam (L2), sgd, momentum, dampened, nesterov, adagrad, lion.
std::span<const Optimizer> optimizers();

}  // namespace spillway::test
