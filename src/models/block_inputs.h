// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace spillway {

/// Cosines and sines of the rotary embedding. Shapes: [length, head_dim] each, or [batch, 1, length, head_dim].
struct RotaryTables {
  torch::Tensor cos{}, sin{};
};

/// What a block computes from beside its parameters. All but `hidden` may be undefined: then positions count up from
/// zero, a position sees what precedes it, and nothing is kept.
struct BlockInputs {
  torch::Tensor hidden{};         // hidden states [batch, length, width]; the embedding's are tokens [batch, length]
  torch::Tensor positions{};      // [batch, length] int64
  RotaryTables rotary{};          // of these positions
  RotaryTables sliding_rotary{};  // where layers that slide have their own
  torch::Tensor mask{}, sliding_mask{};  // [batch, 1, length, length]
  // Of a layer with a cache: where the keys and values of its last positions go [batch, kv_heads, kept, head_dim], and
  // all that a position sees when it comes alone, its own included.
  torch::Tensor new_keys{}, new_values{};
  torch::Tensor keys{}, values{};
};

/// The tensors of `inputs` that are defined, in order, and which these are: what a BlockForward is given, since
/// whoever calls it again may keep tensors alone.
struct PackedInputs {
  std::vector<torch::Tensor> tensors;
  std::uint32_t present = 0;
};

PackedInputs pack(BlockInputs inputs);
BlockInputs unpack(const std::vector<torch::Tensor>& tensors, std::uint32_t present);

}  // namespace spillway
