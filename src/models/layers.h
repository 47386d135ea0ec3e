// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "models/arithmetic.h"
#include "models/dropout.h"
#include "spillway/state/model_config.h"

namespace spillway {

// The leaves of all models. Their parameters are allocated and not initialised: what fills them (random numbers, a
// file) touches the memory first.

/// How an adapter acts: scaling x B A dropout(x) is added to what its layer computes.
struct AdapterSettings {
  double scaling = 1;
  double dropout = 0;
  std::shared_ptr<DropoutGenerator> generator;
};

/// A linear layer with parameters `weight` and, where asked for, `bias`; with an adapter also `lora_A.weight`
/// [rank, in] and `lora_B.weight` [out, rank].
class Dense : public torch::nn::Module {
 public:
  Dense(std::int64_t in, std::int64_t out, bool bias, WeightLayout layout, const torch::TensorOptions& options);
  torch::Tensor forward(const torch::Tensor& x) const;

  /// Adds an adapter of the weight's type, not initialised.
  void add_adapter(std::int64_t rank, AdapterSettings settings);
  void remove_adapter();
  bool has_adapter() const { return lora_a_ != nullptr; }
  WeightLayout layout() const { return layout_; }

  torch::Tensor weight, bias;

 private:
  WeightLayout layout_;
  AdapterSettings adapter_;
  std::shared_ptr<Dense> lora_a_, lora_b_;
};

/// A table of vectors with parameter `weight` [rows, width]. Looking up the row `padding` gives it no gradient.
class Embedding : public torch::nn::Module {
 public:
  Embedding(std::int64_t rows, std::int64_t width, const torch::TensorOptions& options,
            std::optional<std::int64_t> padding = std::nullopt);
  torch::Tensor forward(const torch::Tensor& tokens) const;

  torch::Tensor weight;

 private:
  std::optional<std::int64_t> padding_;
};

class LayerNorm : public torch::nn::Module {
 public:
  LayerNorm(std::int64_t width, double epsilon, const torch::TensorOptions& options);
  torch::Tensor forward(const torch::Tensor& x) const;

  torch::Tensor weight, bias;

 private:
  double epsilon_;
};

/// Root-mean-square norm, computed in fp32 as transformers does: rounded before it is multiplied by the weight, or,
/// with `plus_one` (Gemma), multiplied by 1 + weight and then rounded.
class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(std::int64_t width, double epsilon, bool plus_one, const torch::TensorOptions& options);
  torch::Tensor forward(const torch::Tensor& x) const;

  torch::Tensor weight;

 private:
  double epsilon_;
  bool plus_one_;
};

torch::Tensor activate(Activation activation, const torch::Tensor& x);

}  // namespace spillway
