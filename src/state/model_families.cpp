// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "spillway/core/error.h"
#include "state/model_config_parts.h"

namespace spillway {
namespace {

constexpr NumberRange kEpsilon{0, 1, true};
constexpr NumberRange kRange{0, 1};
constexpr NumberRange kDropout{0, 0.999999};

// What a missing key means: the defaults of transformers 5.24.
struct Defaults {
  ModelFamily family;
  std::int64_t vocabulary;
  std::int64_t intermediate;
  std::optional<std::int64_t> kv_heads;
  std::int64_t max_position;
  std::int64_t hidden = 4096, layers = 32, heads = 32;
};
constexpr std::int64_t kWindow = 4096;
constexpr std::array<Defaults, 6> kDefaults{{{ModelFamily::llama, 32000, 11008, std::nullopt, 2048},
                                             {ModelFamily::qwen2, 151936, 22016, 32, 32768},
                                             {ModelFamily::mistral, 32000, 14336, 8, 131072},
                                             {ModelFamily::qwen3, 151936, 22016, 32, 32768},
                                             {ModelFamily::gemma2, 256000, 9216, 4, 8192, 2304, 26, 8},
                                             {ModelFamily::gemma3, 262208, 9216, 4, 131072, 2304, 26, 8}}};

const Defaults& defaults_of(ModelFamily family) {
  for (const Defaults& entry : kDefaults) {
    if (entry.family == family) return entry;
  }
  throw InternalError("no defaults for this model family");
}

// Qwen: a window counts only where use_sliding_window says so, and then for the layers of layer_types or for those from
// max_window_layers on.
void read_qwen_window(ConfigKeys& keys, ModelConfig& config) {
  const bool used = keys.boolean("use_sliding_window", false);
  const auto window = keys.integer_or_null("sliding_window", kWindow, limits::kPositions);
  const std::int64_t first = keys.integer("max_window_layers", 28, {0, limits::kCount.highest});
  std::vector<bool> slides = read_layer_types(keys, config.layers);
  if (slides.empty()) {
    for (std::int64_t i = 0; i < config.layers; ++i) slides.push_back(used && window && i >= first);
  }
  const auto count = std::count(slides.begin(), slides.end(), true);
  if (count == 0) return;
  if (!used || !window) {
    keys.fail("layer_types", "sliding_attention needs \"use_sliding_window\": true and a \"sliding_window\"");
  }
  config.sliding_window = window;
  if (count != config.layers) config.layer_slides = std::move(slides);
}

// Mistral: every layer slides, unless the window is null. transformers ignores layer_types; one that says otherwise was
// meant for another model.
void read_mistral_window(ConfigKeys& keys, ModelConfig& config) {
  config.sliding_window = keys.integer_or_null("sliding_window", kWindow, limits::kPositions);
  for (const bool slides : read_layer_types(keys, config.layers)) {
    if (slides != config.sliding_window.has_value()) {
      keys.fail("layer_types", "in this family all layers slide where \"sliding_window\" is set, else none");
    }
  }
}

void read_head_dim(ConfigKeys& keys, ModelConfig& config) {
  const std::int64_t derived = config.hidden / config.heads;  // exact: check_sizes refuses the rest
  if (config.family == ModelFamily::qwen3) {
    config.head_dim = keys.integer("head_dim", 128, limits::kCount);
  } else if (is_gemma(config.family)) {
    config.head_dim = keys.integer("head_dim", 256, limits::kCount);
  } else if (config.family == ModelFamily::qwen2) {
    config.head_dim = keys.integer("head_dim", derived, limits::kCount);
  } else {
    config.head_dim = keys.integer_or_null("head_dim", std::nullopt, limits::kCount).value_or(derived);
  }
}

// transformers gives this number to the embedding, whose row then gets no gradient; a negative one counts from the end.
std::optional<std::int64_t> read_padding_token(ConfigKeys& keys, const ModelConfig& config) {
  const std::optional<std::int64_t> missing = is_gemma(config.family) ? std::optional<std::int64_t>(0) : std::nullopt;
  const auto token = keys.integer_or_null("pad_token_id", missing, {-config.vocabulary, config.vocabulary - 1});
  return token && *token < 0 ? *token + config.vocabulary : token;
}

void read_biases(ConfigKeys& keys, ModelConfig& config) {
  switch (config.family) {
    case ModelFamily::llama:
      config.attention_bias = keys.boolean("attention_bias", false);
      config.attention_output_bias = config.attention_bias;
      config.mlp_bias = keys.boolean("mlp_bias", false);
      return;
    case ModelFamily::qwen3:
    case ModelFamily::gemma2:
    case ModelFamily::gemma3:
      config.attention_bias = keys.boolean("attention_bias", false);
      config.attention_output_bias = config.attention_bias;
      break;
    case ModelFamily::qwen2:
      config.attention_bias = true;
      break;
    default:
      keys.only("attention_bias", "[false]");
      break;
  }
  keys.only("mlp_bias", "[false]");
}

void read_family_extras(ConfigKeys& keys, ModelConfig& config) {
  switch (config.family) {
    case ModelFamily::llama:
      keys.only("pretraining_tp", "[1, null]");
      keys.only("sliding_window", "[null]");
      break;
    case ModelFamily::mistral:
      read_mistral_window(keys, config);
      break;
    case ModelFamily::gemma2:
    case ModelFamily::gemma3:
      read_gemma(keys, config);
      break;
    default:
      keys.only("use_mrope", "[false]");
      read_qwen_window(keys, config);
      break;
  }
}

}  // namespace

Activation read_activation(ConfigKeys& keys, const std::string& key, const std::string& missing) {
  static constexpr std::array<std::pair<std::string_view, Activation>, 8> kWords{
      {{"silu", Activation::silu},
       {"swish", Activation::silu},
       {"gelu", Activation::gelu},
       {"gelu_python", Activation::gelu},
       {"gelu_new", Activation::gelu_tanh},
       {"gelu_pytorch_tanh", Activation::gelu_tanh},
       {"gelu_python_tanh", Activation::gelu_tanh},
       {"relu", Activation::relu}}};
  const std::string word = keys.text(key, missing);
  for (const auto& [name, activation] : kWords) {
    if (name == word) return activation;
  }
  keys.fail(key, "Spillway supports silu, swish, gelu, gelu_new, gelu_pytorch_tanh and relu");
}

std::vector<bool> read_layer_types(ConfigKeys& keys, std::int64_t layers) {
  std::vector<bool> slides;
  const nlohmann::json* types = keys.find("layer_types");
  if (types == nullptr || types->is_null()) return slides;
  if (!types->is_array() || types->size() != static_cast<std::size_t>(layers)) {
    keys.fail("layer_types", fmt::format("expected a list of {} strings, one a layer", layers));
  }
  for (const nlohmann::json& type : *types) {
    const std::string word = type.is_string() ? type.get<std::string>() : type.dump();
    if (word != "full_attention" && word != "sliding_attention") {
      keys.fail("layer_types", fmt::format("Spillway supports full_attention and sliding_attention, not {}", word));
    }
    slides.push_back(word == "sliding_attention");
  }
  return slides;
}

void read_gpt2(ConfigKeys& keys, ModelConfig& config) {
  config.vocabulary = keys.integer("vocab_size", 50257, limits::kVocabulary);
  config.max_position = keys.integer("n_positions", 1024, limits::kPositions);
  config.hidden = keys.integer("n_embd", 768, limits::kHidden);
  config.layers = keys.integer("n_layer", 12, limits::kCount);
  config.heads = keys.integer("n_head", 12, limits::kCount);
  config.intermediate =
      keys.integer_or_null("n_inner", std::nullopt, limits::kIntermediate).value_or(4 * config.hidden);
  config.activation = read_activation(keys, "activation_function", "gelu_new");
  config.residual_dropout = keys.number("resid_pdrop", 0.1, kDropout);
  config.embedding_dropout = keys.number("embd_pdrop", 0.1, kDropout);
  config.attention_dropout = keys.number("attn_pdrop", 0.1, kDropout);
  config.norm_eps = keys.number("layer_norm_epsilon", 1e-5, kEpsilon);
  config.initializer_range = keys.number("initializer_range", 0.02, kRange);
  config.scale_attention = keys.boolean("scale_attn_weights", true);
  config.scale_attention_by_inverse_layer = keys.boolean("scale_attn_by_inverse_layer_idx", false);
  config.tied_head = keys.boolean("tie_word_embeddings", true);
  keys.only("reorder_and_upcast_attn", "[false]");
  keys.find("pad_token_id");  // GPT-2's embedding does not use it
  config.kv_heads = config.heads;
  config.head_dim = config.hidden / config.heads;
  config.attention_bias = config.attention_output_bias = config.mlp_bias = true;
}

void read_llama_like(ConfigKeys& keys, ModelConfig& config) {
  const Defaults& defaults = defaults_of(config.family);
  config.vocabulary = keys.integer("vocab_size", defaults.vocabulary, limits::kVocabulary);
  config.hidden = keys.integer("hidden_size", defaults.hidden, limits::kHidden);
  config.intermediate = keys.integer("intermediate_size", defaults.intermediate, limits::kIntermediate);
  config.layers = keys.integer("num_hidden_layers", defaults.layers, limits::kCount);
  config.heads = keys.integer("num_attention_heads", defaults.heads, limits::kCount);
  config.kv_heads =
      keys.integer_or_null("num_key_value_heads", defaults.kv_heads, limits::kCount).value_or(config.heads);
  config.max_position = keys.integer("max_position_embeddings", defaults.max_position, limits::kPositions);
  if (!is_gemma(config.family)) config.activation = read_activation(keys, "hidden_act", "silu");
  config.norm_eps = keys.number("rms_norm_eps", 1e-6, kEpsilon);
  config.initializer_range = keys.number("initializer_range", 0.02, kRange);
  config.attention_dropout = keys.number("attention_dropout", 0, kDropout);
  config.tied_head = keys.boolean("tie_word_embeddings", is_gemma(config.family));
  config.qk_norm = config.family == ModelFamily::qwen3 || config.family == ModelFamily::gemma3;
  config.padding_token = read_padding_token(keys, config);
  read_biases(keys, config);
  read_family_extras(keys, config);
  config.family == ModelFamily::gemma3 ? read_rope_of_layer_kinds(keys, config) : read_rope(keys, config);
  read_head_dim(keys, config);
}

}  // namespace spillway
