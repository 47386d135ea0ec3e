// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>

#include "spillway/core/config.h"

namespace spillway::test {

/// Adam or AdamW of one parameter in double, written from the papers: what fp32 updates have to stay close to.
struct DoubleAdam {
  explicit DoubleAdam(const torch::Tensor& start)
      : p(start.to(torch::kDouble)), m(torch::zeros_like(p)), v(torch::zeros_like(p)) {}

  void step(const torch::Tensor& gradient, const Hyperparameters& h, bool decoupled) {
    ++t;
    torch::Tensor g = gradient.to(torch::kDouble);
    if (decoupled) {
      p = p * (1 - h.lr * h.weight_decay);
    } else {
      g = g + h.weight_decay * p;
    }
    m = h.beta1 * m + (1 - h.beta1) * g;
    v = h.beta2 * v + (1 - h.beta2) * g * g;
    const double first = 1 - std::pow(h.beta1, t), second = 1 - std::pow(h.beta2, t);
    p = p - h.lr * (m / first) / (torch::sqrt(v / second) + h.eps);
  }

  /// The largest distance of any element of `actual` from this one's value.
  double distance(const torch::Tensor& actual) const {
    return p.numel() == 0 ? 0.0 : (actual.to(torch::kDouble) - p).abs().max().item<double>();
  }

  torch::Tensor p, m, v;
  std::int64_t t = 0;
};

}  // namespace spillway::test
