// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

namespace spillway {

// Stand-ins, for tensors without memory, for LibTorch's operators that know no such tensors: they give the shapes, and
// keep for backward what the operators keep on a processor.

/// at::embedding.
torch::Tensor meta_embedding(const torch::Tensor& weight, const torch::Tensor& tokens);
/// at::layer_norm over the last dimension.
torch::Tensor meta_layer_norm(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias);

}  // namespace spillway
