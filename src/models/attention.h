// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>

#include "models/block_inputs.h"
#include "models/dropout.h"
#include "spillway/state/model_config.h"

namespace spillway {

/// The rotary frequencies of the base `theta`, with the configuration's scaling applied where asked for.
/// Shapes: [head_dim / 2], fp32, in host memory.
torch::Tensor rotary_frequencies(const ModelConfig& config, double theta, bool scaled);

/// Rotates queries or keys. Shapes: x [batch, heads, length, head_dim].
torch::Tensor rotate(const torch::Tensor& x, const RotaryTables& tables);

/// What is added to scores: 0 where a query may see a key, the type's lowest value elsewhere. A query sees itself and
/// what precedes it, `window` positions in all where given.
/// Shapes: [length, length].
torch::Tensor causal_mask(std::int64_t length, std::optional<std::int64_t> window, const torch::TensorOptions& options);

/// Whether a layer sees through the configuration's window.
bool layer_slides(const ModelConfig& config, std::int64_t layer);

/// Tensors that depend on nothing but length, element type and device; made when first asked for and kept until another
/// length is.
class AttentionConstants {
 public:
  explicit AttentionConstants(const ModelConfig& config);

  /// For a block whose input is `hidden` [batch, length, ...].
  const RotaryTables& rotary(const torch::Tensor& hidden, bool sliding);
  const torch::Tensor& mask(const torch::Tensor& hidden, bool sliding);

  /// As the two above where `inputs` does not say otherwise.
  RotaryTables rotary_of(const BlockInputs& inputs, bool sliding);
  torch::Tensor mask_of(const BlockInputs& inputs, bool sliding);

  /// Gives `inputs` these positions, and the rotary tables of them where positions are not learned.
  /// Shapes: positions [batch, length] int64.
  void set_positions(BlockInputs& inputs, torch::Tensor positions, torch::ScalarType type) const;
  /// Positions, rotary tables and masks of rows that hold several documents. Shapes: documents [batch, length] int64.
  BlockInputs of_documents(const torch::Tensor& documents, torch::ScalarType type) const;
  /// Frees what is kept.
  void forget();

 private:
  void fit(const torch::Tensor& hidden);

  std::optional<std::int64_t> window_;
  bool all_slide_ = true, none_slides_ = true;
  torch::Tensor frequencies_;          // undefined where positions are learned
  torch::Tensor sliding_frequencies_;  // where layers that slide have their own
  std::int64_t length_ = -1;
  torch::TensorOptions options_;
  RotaryTables rotary_, sliding_rotary_;
  torch::Tensor full_, sliding_;
};

struct AttentionSettings {
  double scale = 1;
  double dropout = 0;
  std::optional<double> softcap{};  // scores x become cap * tanh(x / cap)
};

/// Softmax attention, one operation after the other as transformers' eager form: scores, scale, cap, mask, softmax in
/// fp32. The keys may be more than the queries; several query heads share one key head. Shapes: query [batch, heads,
/// queries, head_dim], key and value [batch, kv_heads, keys, head_dim], mask [queries, keys] -> [batch, queries, heads
/// * head_dim].
torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value,
                     const torch::Tensor& mask, const AttentionSettings& settings, DropoutGenerator& dropout,
                     bool training);

/// Puts a block's keys and values into its cache. Where the block has one position alone, returns what that position
/// sees of the cache, computed as by `attend`; else an undefined tensor: the block attends to its own.
torch::Tensor attend_cached(const BlockInputs& inputs, const torch::Tensor& query, const torch::Tensor& key,
                            const torch::Tensor& value, const AttentionSettings& settings);

}  // namespace spillway
