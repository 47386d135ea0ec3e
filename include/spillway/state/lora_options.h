// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "spillway/state/model_config.h"

namespace spillway {

/// Low-rank adapters of a model: each adapted linear layer computes W x + scaling() B A dropout(x), with W frozen, A
/// [rank, in] and B [out, rank] trained. Defaults are PEFT's.
/// Source: Hu et al., LoRA, arXiv 2106.09685, section 4.1; rank_stabilized: Kalajdzievski, arXiv 2312.03732.
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;
  double dropout = 0;
  bool rank_stabilized = false;  // alpha / sqrt(rank) instead of alpha / rank
  /// Which linear layers of the layer blocks carry an adapter: whole module names, their ends as PEFT takes them
  /// ("q_proj", "mlp.c_proj"), patterns of whole names with * and ?, or "all-linear". Empty: the family's own,
  /// default_lora_targets. Embeddings and the head carry none.
  std::vector<std::string> targets{};

  double scaling() const;
  /// Throws: InvalidArgument naming what is out of range.
  void validate() const;

  /// Reads the text of PEFT's adapter_config.json; `source` names it in messages. Where the adapters come from and what
  /// base they are for is ignored; every key that would change what they compute is an error that names it, so is an
  /// unknown one whose value is not null, false or empty. Throws: InvalidArgument.
  static LoraOptions parse(const std::string& json, const std::string& source);
  /// Reads FILE, or FOLDER/adapter_config.json. Throws: FileError, InvalidArgument.
  static LoraOptions load(const std::filesystem::path& file_or_folder);

  bool operator==(const LoraOptions&) const = default;
};

/// What PEFT adapts where nothing is said: GPT-2's c_attn; q_proj and v_proj elsewhere.
std::vector<std::string> default_lora_targets(ModelFamily family);

/// A linear layer that carries an adapter.
struct LoraModule {
  std::string name;  // "model.layers.0.self_attn.q_proj"
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::int64_t block = 0;  // as ParameterShape::block
};

/// The linear layers that `options` adapts, in registration order. Throws: InvalidArgument for a target that matches
/// none, with the nearest name; what validate() throws.
std::vector<LoraModule> lora_modules(const ModelConfig& config, const LoraOptions& options);

/// The parameters that adapters add, in registration order: `<module>.lora_A.weight` and `<module>.lora_B.weight`.
/// They are all that is trained; those of parameter_shapes(config) are frozen. Throws: as lora_modules.
std::vector<ParameterShape> lora_parameter_shapes(const ModelConfig& config, const LoraOptions& options);

}  // namespace spillway
