// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/arithmetic.h"
#include "models/layers.h"
#include "spillway/models/causal_lm.h"

namespace spillway {

inline constexpr std::string_view kLoraA = ".lora_A.weight";
inline constexpr std::string_view kLoraB = ".lora_B.weight";

inline bool is_adapter(std::string_view parameter) {
  return parameter.ends_with(kLoraA) || parameter.ends_with(kLoraB);
}

/// W + scaling B A (transposed where W is [in, out]), in fp32.
torch::Tensor merged_weight(const torch::Tensor& weight, const torch::Tensor& a, const torch::Tensor& b, double scaling,
                            WeightLayout layout);

/// Adds and removes a model's adapters: what CausalLM lets nobody else do.
class LoraEditor {
 public:
  /// Throws: StateError where the model's blocks are bound, since an engine would not know of the change.
  explicit LoraEditor(CausalLM& model);

  /// Freezes all parameters and gives the targeted layers adapters, not initialised; returns the new parameters in
  /// registration order. Throws, before anything is changed: InvalidArgument where the model has adapters; as
  /// lora_modules.
  std::vector<std::pair<std::string, torch::Tensor>> add(const LoraOptions& options);

  /// Removes all adapters. Each weight takes the merged one's values first where `merge`.
  void remove(bool merge);

 private:
  std::vector<std::shared_ptr<Dense>> adapted() const;

  CausalLM& model_;
};

}  // namespace spillway
