// SPDX-License-Identifier: Apache-2.0
#include "models/config_json.h"

#include <nlohmann/json.hpp>

#include "models/attention.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

using Json = nlohmann::ordered_json;

const char* transformers_name(DType type) {
  switch (type) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    default:
      throw InternalError("A config.json of a model in a type that is none of fp32, bf16, fp16.");
  }
}

const char* transformers_name(Activation activation, ModelFamily family) {
  switch (activation) {
    case Activation::gelu:
      return "gelu";
    case Activation::gelu_tanh:
      return family == ModelFamily::gpt2 ? "gelu_new" : "gelu_pytorch_tanh";
    case Activation::relu:
      return "relu";
    case Activation::silu:
      return "silu";
  }
  throw InternalError("An activation without a name.");
}

const char* architecture(ModelFamily family) {
  switch (family) {
    case ModelFamily::gpt2:
      return "GPT2LMHeadModel";
    case ModelFamily::llama:
      return "LlamaForCausalLM";
    case ModelFamily::qwen2:
      return "Qwen2ForCausalLM";
    case ModelFamily::mistral:
      return "MistralForCausalLM";
    case ModelFamily::qwen3:
      return "Qwen3ForCausalLM";
    case ModelFamily::gemma2:
      return "Gemma2ForCausalLM";
    case ModelFamily::gemma3:
      return "Gemma3ForCausalLM";
  }
  throw InternalError("A model family without an architecture.");
}

template <typename T>
Json number_or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

void add_gpt2(Json& json, const ModelConfig& config) {
  json["n_positions"] = config.max_position;
  json["n_embd"] = config.hidden;
  json["n_layer"] = config.layers;
  json["n_head"] = config.heads;
  json["n_inner"] = config.intermediate;
  json["activation_function"] = transformers_name(config.activation, config.family);
  json["layer_norm_epsilon"] = config.norm_eps;
  json["embd_pdrop"] = config.embedding_dropout;
  json["attn_pdrop"] = config.attention_dropout;
  json["resid_pdrop"] = config.residual_dropout;
  json["scale_attn_weights"] = config.scale_attention;
  json["scale_attn_by_inverse_layer_idx"] = config.scale_attention_by_inverse_layer;
}

// The form that transformers wrote before its version 5: every version reads it.
void add_rope(Json& json, const ModelConfig& config) {
  const RopeScaling& rope = config.rope;
  json["rope_theta"] = config.rope_theta;
  if (config.sliding_rope_theta) json["rope_local_base_freq"] = *config.sliding_rope_theta;
  switch (rope.type) {
    case RopeScaling::Type::none:
      break;
    case RopeScaling::Type::linear:
      json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", rope.factor}};
      break;
    case RopeScaling::Type::llama3:
      json["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", rope.factor},
                              {"low_freq_factor", rope.low_freq_factor},
                              {"high_freq_factor", rope.high_freq_factor},
                              {"original_max_position_embeddings", rope.original_max_position}};
      break;
  }
}

bool is_gemma(ModelFamily family) {
  return family == ModelFamily::gemma2 || family == ModelFamily::gemma3;
}

void add_window(Json& json, const ModelConfig& config) {
  if (config.family == ModelFamily::llama) return;
  if (config.family == ModelFamily::mistral) {
    json["sliding_window"] = number_or_null(config.sliding_window);
    return;
  }
  // Where no layer slides, a missing window means that to Qwen; Gemma's layers slide by default.
  if (!is_gemma(config.family)) json["use_sliding_window"] = config.sliding_window.has_value();
  if (!is_gemma(config.family) && !config.sliding_window) return;
  if (config.sliding_window) json["sliding_window"] = *config.sliding_window;
  json["layer_types"] = Json::array();
  for (std::int64_t i = 0; i < config.layers; ++i) {
    json["layer_types"].push_back(layer_slides(config, i) ? "sliding_attention" : "full_attention");
  }
}

void add_gemma(Json& json, const ModelConfig& config) {
  json["query_pre_attn_scalar"] = *config.query_pre_attn_scalar;
  json["attn_logit_softcapping"] = number_or_null(config.attention_softcap);
  json["final_logit_softcapping"] = number_or_null(config.logit_softcap);
}

void add_llama(Json& json, const ModelConfig& config) {
  json["max_position_embeddings"] = config.max_position;
  json["hidden_size"] = config.hidden;
  json["intermediate_size"] = config.intermediate;
  json["num_hidden_layers"] = config.layers;
  json["num_attention_heads"] = config.heads;
  json["num_key_value_heads"] = config.kv_heads;
  const bool usual_head = config.head_dim * config.heads == config.hidden;
  const bool gemma = is_gemma(config.family), qwen3 = config.family == ModelFamily::qwen3;
  if (qwen3 || gemma || !usual_head) json["head_dim"] = config.head_dim;
  json[gemma ? "hidden_activation" : "hidden_act"] = transformers_name(config.activation, config.family);
  json["rms_norm_eps"] = config.norm_eps;
  json["attention_dropout"] = config.attention_dropout;
  if (config.family == ModelFamily::llama || qwen3 || gemma) json["attention_bias"] = config.attention_bias;
  if (config.family == ModelFamily::llama) json["mlp_bias"] = config.mlp_bias;
  if (gemma) add_gemma(json, config);
  add_rope(json, config);
  add_window(json, config);
}

}  // namespace

std::string config_json(const ModelConfig& config, DType dtype) {
  Json json;
  json["architectures"] = {architecture(config.family)};
  json["model_type"] = std::string(to_string(config.family));
  json["vocab_size"] = config.vocabulary;
  config.family == ModelFamily::gpt2 ? add_gpt2(json, config) : add_llama(json, config);
  json["initializer_range"] = config.initializer_range;
  json["tie_word_embeddings"] = config.tied_head;
  json["bos_token_id"] = nullptr;
  json["eos_token_id"] = number_or_null(config.eos_token);
  if (config.family != ModelFamily::gpt2) json["pad_token_id"] = number_or_null(config.padding_token);
  json["torch_dtype"] = transformers_name(dtype);
  return json.dump(2) + "\n";
}

std::string config_json_with_dtype(const std::string& source, DType dtype) {
  Json json = Json::parse(source);
  const bool has_new_key = json.contains("dtype");
  if (has_new_key) json["dtype"] = transformers_name(dtype);
  if (json.contains("torch_dtype") || !has_new_key) json["torch_dtype"] = transformers_name(dtype);
  return json.dump(2) + "\n";
}

}  // namespace spillway
