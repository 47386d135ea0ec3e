// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/core/dtype.h"

namespace spillway {

enum class ModelFamily { gpt2, llama, qwen2, mistral, qwen3, gemma2, gemma3 };
/// The family's `model_type`: "gpt2", "llama", ..., "gemma3_text".
std::string_view to_string(ModelFamily family);

enum class Activation { gelu, gelu_tanh, relu, silu };

/// How rotary frequencies are changed for longer contexts (Hugging Face `rope_scaling` / `rope_parameters`).
struct RopeScaling {
  enum class Type { none, linear, llama3 };
  Type type = Type::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_max_position = 0;

  bool operator==(const RopeScaling&) const = default;
};

/// The shape of a decoder-only language model: what a Hugging Face `config.json` says and Spillway runs.
///
/// A missing key means the family's default in transformers, which is not what null means. Every key that affects the
/// forward pass is checked: an unknown or unsupported one is an error that names it; keys on a published list of
/// harmless ones (names, versions, token numbers, inference caches; docs/formats.md) are ignored. Sizes are bounded so
/// that no product of them, nor the bytes of all states, passes 63 bits.
struct ModelConfig {
  ModelFamily family = ModelFamily::llama;
  std::int64_t vocabulary = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t max_position = 0;
  Activation activation = Activation::silu;
  double norm_eps = 1e-5;
  bool tied_head = false;
  bool attention_bias = false;         // q, k, v
  bool attention_output_bias = false;  // o
  bool mlp_bias = false;
  bool qk_norm = false;          // Qwen3, Gemma 3: RMS norm of each head's query and key
  bool norm_plus_one = false;    // Gemma: norms multiply by 1 + weight, before they round
  bool branch_norms = false;     // Gemma: what attention and MLP give is normed before it is added
  bool scale_embedding = false;  // Gemma: embeddings are multiplied by sqrt(hidden), rounded to their type
  std::optional<std::int64_t> query_pre_attn_scalar;  // scores are divided by its square root; empty: by head_dim's
  std::optional<double> attention_softcap;            // Gemma 2: scores x become cap * tanh(x / cap)
  std::optional<double> logit_softcap;                // Gemma: logits likewise
  double rope_theta = 10000.0;
  RopeScaling rope;
  std::optional<double> sliding_rope_theta;    // Gemma 3: of the layers that slide, whose frequencies are not scaled
  std::optional<std::int64_t> sliding_window;  // positions a query sees, itself included
  std::vector<bool> layer_slides;              // one a layer where only some slide; empty: all alike
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;
  double initializer_range = 0.02;
  bool scale_attention = true;                    // GPT-2 scale_attn_weights
  bool scale_attention_by_inverse_layer = false;  // GPT-2 scale_attn_by_inverse_layer_idx
  std::optional<DType> stored_dtype;              // torch_dtype / dtype, for information
  std::optional<std::int64_t> eos_token;          // the first of a list; empty where it is not in the vocabulary
  /// The row of the token embedding that gets no gradient from it (all but GPT-2, where pad_token_id is given).
  std::optional<std::int64_t> padding_token;

  /// Reads the text of a config.json; `source` names it in messages. Throws: InvalidArgument naming the key, what it
  /// says and what is supported.
  static ModelConfig parse(const std::string& json, const std::string& source);
  /// Reads FILE, or FOLDER/config.json. Throws: FileError, InvalidArgument.
  static ModelConfig load(const std::filesystem::path& file_or_folder);
};

/// One parameter of a model: Hugging Face name and shape.
struct ParameterShape {
  std::string name;
  std::vector<std::int64_t> shape;
  /// The layer block it belongs to: 0 the embedding, 1..layers the layers, layers+1 the final norm and head.
  std::int64_t block = 0;

  std::int64_t numel() const;
};

/// All parameters in registration order (a tied head is not listed): what the model built from `config` registers,
/// known without building it.
std::vector<ParameterShape> parameter_shapes(const ModelConfig& config);

}  // namespace spillway
