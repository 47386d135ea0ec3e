// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/state/model_config.h"
#include "state/config_keys.h"

namespace spillway {

/// Keys that change nothing of what Spillway computes with a model; docs/formats.md lists them.
const std::set<std::string_view>& harmless_config_keys();

/// Reads a family's keys into `config`, whose family is set.
void read_gpt2(ConfigKeys& keys, ModelConfig& config);
void read_llama_like(ConfigKeys& keys, ModelConfig& config);

/// Reads what Gemma 2 and 3 have beyond the Llama family; the sizes of `config` are set.
void read_gemma(ConfigKeys& keys, ModelConfig& config);

/// Reads rope_theta, rope_scaling and rope_parameters; `config.max_position` is set.
void read_rope(ConfigKeys& keys, ModelConfig& config);
/// As read_rope where layers that slide have frequencies of their own (rope_local_base_freq).
void read_rope_of_layer_kinds(ConfigKeys& keys, ModelConfig& config);

Activation read_activation(ConfigKeys& keys, const std::string& key, const std::string& missing);
/// True where a layer slides; empty when the key layer_types is missing or null.
std::vector<bool> read_layer_types(ConfigKeys& keys, std::int64_t layers);

inline bool is_gemma(ModelFamily family) {
  return family == ModelFamily::gemma2 || family == ModelFamily::gemma3;
}

/// The limits within which no product of two sizes passes 63 bits.
namespace limits {
inline constexpr IntegerRange kVocabulary{1, 2'147'483'647};
inline constexpr IntegerRange kPositions{1, 2'147'483'647};
inline constexpr IntegerRange kHidden{1, 1 << 24};
inline constexpr IntegerRange kIntermediate{1, 1 << 26};
inline constexpr IntegerRange kCount{1, 1 << 16};  // layers, heads, elements of a head
}  // namespace limits

}  // namespace spillway
