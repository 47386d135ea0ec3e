// SPDX-License-Identifier: Apache-2.0
#include "models/block_inputs.h"

#include <array>
#include <utility>

namespace spillway {
namespace {

std::array<torch::Tensor*, 12> members(BlockInputs& inputs) {
  return {&inputs.hidden,
          &inputs.positions,
          &inputs.rotary.cos,
          &inputs.rotary.sin,
          &inputs.sliding_rotary.cos,
          &inputs.sliding_rotary.sin,
          &inputs.mask,
          &inputs.sliding_mask,
          &inputs.new_keys,
          &inputs.new_values,
          &inputs.keys,
          &inputs.values};
}

}  // namespace

PackedInputs pack(BlockInputs inputs) {
  PackedInputs packed;
  std::uint32_t bit = 1;
  for (torch::Tensor* member : members(inputs)) {
    if (member->defined()) {
      packed.present |= bit;
      packed.tensors.push_back(std::move(*member));
    }
    bit <<= 1U;
  }
  return packed;
}

BlockInputs unpack(const std::vector<torch::Tensor>& tensors, std::uint32_t present) {
  BlockInputs inputs;
  std::uint32_t bit = 1;
  std::size_t next = 0;
  for (torch::Tensor* member : members(inputs)) {
    if ((present & bit) != 0) *member = tensors.at(next++);
    bit <<= 1U;
  }
  return inputs;
}

}  // namespace spillway
