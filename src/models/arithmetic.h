// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

namespace spillway {

/// How a weight matrix lies in memory: [out, in] (Linear) or [in, out] (GPT-2's Conv1D).
enum class WeightLayout { out_in, in_out };

/// x W^T + b, or x W + b, over the last dimension of `x`; `bias` may be undefined.
///
/// On processors 16-bit types are widened to fp32, multiplied, and rounded once, forward and backward: LibTorch's own
/// 16-bit products are over a hundred times slower there, and this is what tensor cores compute.
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     WeightLayout layout);

/// The batched product of two tensors with equal leading dimensions; 16-bit types as in `linear`.
torch::Tensor batched_product(const torch::Tensor& a, const torch::Tensor& b);

/// cap * tanh(x / cap), which none passes; writes over `x`.
torch::Tensor soft_capped(const torch::Tensor& x, double cap);

}  // namespace spillway
