// SPDX-License-Identifier: Apache-2.0
#include "kernels/scalars.h"

#include <cmath>

#include "kernels/state_formats.h"

namespace spillway::kernels {
namespace {

// The output function of SplitMix64. Source: Steele, Lea and Flood 2014.
std::uint64_t mix(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

}  // namespace

AdamScalars adam_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                         std::int64_t step, float grad_factor) {
  const double t = static_cast<double>(step);
  AdamScalars scalars;
  scalars.grad_factor = grad_factor;
  scalars.beta1 = static_cast<float>(beta1);
  scalars.c1 = static_cast<float>(1 - beta1);
  scalars.beta2 = static_cast<float>(beta2);
  scalars.c2 = static_cast<float>(1 - beta2);
  scalars.s = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, t)));
  scalars.eps = static_cast<float>(eps);
  scalars.a = static_cast<float>(lr / (1 - std::pow(beta1, t)));
  if (decoupled) {
    scalars.k = static_cast<float>(1 - lr * weight_decay);
  } else {
    scalars.l2 = static_cast<float>(weight_decay);
  }
  return scalars;
}

SgdScalars sgd_scalars(double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                       std::int64_t step, float grad_factor) {
  return {.grad_factor = grad_factor,
          .lr = static_cast<float>(lr),
          .mu = static_cast<float>(momentum),
          .c = static_cast<float>(1 - dampening),
          .l2 = static_cast<float>(weight_decay),
          .first = step == 1,
          .nesterov = nesterov};
}

AdagradScalars adagrad_scalars(double lr, double lr_decay, double eps, double weight_decay, std::int64_t step,
                               float grad_factor) {
  return {.grad_factor = grad_factor,
          .clr = static_cast<float>(lr / (1 + static_cast<double>(step - 1) * lr_decay)),
          .eps = static_cast<float>(eps),
          .l2 = static_cast<float>(weight_decay)};
}

LionScalars lion_scalars(double lr, double beta1, double beta2, double weight_decay, float grad_factor) {
  return {.grad_factor = grad_factor,
          .beta1 = static_cast<float>(beta1),
          .c1 = static_cast<float>(1 - beta1),
          .beta2 = static_cast<float>(beta2),
          .c2 = static_cast<float>(1 - beta2),
          .lr = static_cast<float>(lr),
          .k = static_cast<float>(1 - lr * weight_decay)};
}

RoundingKey rounding_key(std::uint64_t seed, std::int64_t step) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  return {.bits = mix(mix(seed + kGolden) + static_cast<std::uint64_t>(step) * kGolden)};
}

}  // namespace spillway::kernels
