// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels of every processor are told: element types and the scalars of one optimizer step. C++17 and the
// standard library alone, so that nvcc reads it too.

#include <cstdint>

namespace spillway::kernels {

/// Elements of one grain: the unit of the numerics.
constexpr std::int64_t kGrain = 1024;

/// Element types that kernels read and write; `none` where an optional output is not wanted.
enum class Element : std::uint8_t { f32, bf16, f16, none };

/// The scalars of one Adam or AdamW step, computed in double and rounded to fp32 once. Source: Kingma and Ba 2015,
/// Algorithm 1; decoupled decay: Loshchilov and Hutter 2019.
struct AdamScalars {
  float grad_factor = 1;    // f: g = f * g_in, on load
  float beta1 = 0, c1 = 0;  // c1 = 1 - beta1
  float beta2 = 0, c2 = 0;  // c2 = 1 - beta2
  float s = 0;              // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float a = 0;   // lr / (1 - beta1^t)
  float k = 1;   // decoupled decay: p *= k first, k = 1 - lr * weight_decay; 1 where there is none
  float l2 = 0;  // L2 decay: g += l2 * p first; 0: left out
};

/// `step` counts from 1. `decoupled`: AdamW, else Adam with L2.
AdamScalars adam_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                         std::int64_t step, float grad_factor);

/// The scalars of one step of stochastic gradient descent. Source: Sutskever et al. 2013, in PyTorch's form.
struct SgdScalars {
  float grad_factor = 1;
  float lr = 0;
  float mu = 0;           // momentum; 0: the buffer is not used
  float c = 0;            // 1 - dampening
  float l2 = 0;           // L2 decay: g += l2 * p first; 0: left out
  bool first = false;     // the buffer's first step: b = g
  bool nesterov = false;  // p -= lr * (g + mu * b), else p -= lr * b
};

SgdScalars sgd_scalars(double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                       std::int64_t step, float grad_factor);

/// The scalars of one Adagrad step. Source: Duchi et al. 2011, with a decaying rate.
struct AdagradScalars {
  float grad_factor = 1;
  float clr = 0;  // lr / (1 + (t - 1) * lr_decay)
  float eps = 0;
  float l2 = 0;  // L2 decay: g += l2 * p first; 0: left out
};

AdagradScalars adagrad_scalars(double lr, double lr_decay, double eps, double weight_decay, std::int64_t step,
                               float grad_factor);

/// The scalars of one Lion step. Source: Chen et al. 2023, Algorithm 2.
struct LionScalars {
  float grad_factor = 1;
  float beta1 = 0, c1 = 0;  // c1 = 1 - beta1
  float beta2 = 0, c2 = 0;  // c2 = 1 - beta2
  float lr = 0;
  float k = 1;  // p *= k first, k = 1 - lr * weight_decay
};

LionScalars lion_scalars(double lr, double beta1, double beta2, double weight_decay, float grad_factor);

}  // namespace spillway::kernels
