// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <utility>

#include "core/strict_json.h"
#include "formats/mapped_file.h"
#include "spillway/core/error.h"
#include "state/model_config_parts.h"

namespace spillway {
namespace {

using Json = nlohmann::json;

struct FamilyNames {
  ModelFamily family;
  std::string_view type;                          // model_type
  std::array<std::string_view, 3> architectures;  // lower case; all describe the same parameters
};
constexpr std::array<FamilyNames, 7> kFamilies{
    {{ModelFamily::gpt2, "gpt2", {"gpt2lmheadmodel", "gpt2model", "gpt2forcausallm"}},
     {ModelFamily::llama, "llama", {"llamaforcausallm", "llamamodel", ""}},
     {ModelFamily::qwen2, "qwen2", {"qwen2forcausallm", "qwen2model", ""}},
     {ModelFamily::mistral, "mistral", {"mistralforcausallm", "mistralmodel", ""}},
     {ModelFamily::qwen3, "qwen3", {"qwen3forcausallm", "qwen3model", ""}},
     {ModelFamily::gemma2, "gemma2", {"gemma2forcausallm", "gemma2model", ""}},
     {ModelFamily::gemma3, "gemma3_text", {"gemma3forcausallm", "gemma3textmodel", ""}}}};

const FamilyNames& read_family(ConfigKeys& keys) {
  const std::string type = keys.text("model_type", "");
  for (const FamilyNames& names : kFamilies) {
    if (names.type == type) return names;
  }
  keys.fail("model_type", "Spillway runs gpt2, llama, qwen2, mistral, qwen3, gemma2 and gemma3_text");
}

void check_architectures(ConfigKeys& keys, const FamilyNames& names) {
  const Json* list = keys.find("architectures");
  if (list == nullptr || list->is_null()) return;
  if (!list->is_array()) keys.fail("architectures", "expected a list of strings");
  for (const Json& one : *list) {
    if (!one.is_string()) keys.fail("architectures", "expected a list of strings");
    std::string name = one.get<std::string>();
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    if (name.empty() ||
        std::find(names.architectures.begin(), names.architectures.end(), name) == names.architectures.end()) {
      keys.fail("architectures", fmt::format("Spillway runs the causal language model of \"{}\" only", names.type));
    }
  }
}

// GPT-2's own names for sizes have general ones in transformers, which it reads too.
Json with_gpt2_names(const Json& object, const std::string& source) {
  static constexpr std::array<std::pair<const char*, const char*>, 4> kAliases{
      {{"hidden_size", "n_embd"},
       {"max_position_embeddings", "n_positions"},
       {"num_attention_heads", "n_head"},
       {"num_hidden_layers", "n_layer"}}};
  Json renamed = object;
  for (const auto& [general, own] : kAliases) {
    const auto at = object.find(general);
    if (at == object.end()) continue;
    if (object.contains(own) && object.at(own) != *at) {
      ConfigKeys(object, source)
          .fail(general, fmt::format("\"{}\" says {}; keep one of the two", own, object.at(own).dump()));
    }
    renamed[own] = *at;
    renamed.erase(general);
  }
  return renamed;
}

std::optional<DType> read_dtype(ConfigKeys& keys, const char* key) {
  const Json* value = keys.find(key);
  if (value == nullptr || value->is_null()) return std::nullopt;
  std::string word = keys.text(key, "");
  if (word == "auto") return std::nullopt;
  if (word.starts_with("torch.")) word.erase(0, 6);
  const auto type = parse_dtype(word);
  if (!type) keys.fail(key, "expected null or a type such as float32, bfloat16 or float16");
  return type;
}

void read_eos_token(ConfigKeys& keys, ModelConfig& config) {
  std::optional<std::int64_t> missing;
  if (config.family == ModelFamily::gpt2) missing = 50256;
  if (config.family == ModelFamily::llama || config.family == ModelFamily::mistral) missing = 2;
  if (is_gemma(config.family)) missing = 1;
  const Json* value = keys.find("eos_token_id");
  if (value != nullptr) {
    missing = std::nullopt;
    if (value->is_array() && !value->empty()) value = &value->front();
    if (value->is_number_integer() && !(value->is_number_unsigned() && value->get<std::uint64_t>() >> 63 != 0)) {
      missing = value->get<std::int64_t>();
    } else if (!value->is_null()) {
      keys.fail("eos_token_id", "expected null, a token number or a list of them");
    }
  }
  if (missing && *missing >= 0 && *missing < config.vocabulary) config.eos_token = missing;
}

void read_common(ConfigKeys& keys, ModelConfig& config) {
  const auto older = read_dtype(keys, "torch_dtype");
  const auto newer = read_dtype(keys, "dtype");
  config.stored_dtype = newer ? newer : older;
  read_eos_token(keys, config);
  // Each of these changes the computation, so that only the value without effect passes.
  keys.only("is_encoder_decoder", "[false]");
  keys.only("add_cross_attention", "[false]");
  keys.only("cross_attention_hidden_size", "[null]");
  keys.only("tie_encoder_decoder", "[false]");
  keys.only("chunk_size_feed_forward", "[0]");
  keys.only("pruned_heads", "[null, {}]");
  keys.only("per_layer_config", "[null, {}]");
  keys.only("quantization_config", "[null]");
}

void check_sizes(const ConfigKeys& keys, const ModelConfig& config) {
  const bool gpt2 = config.family == ModelFamily::gpt2;
  const auto explicit_dim = keys.object().find("head_dim");
  const bool derived = explicit_dim == keys.object().end() || explicit_dim->is_null();
  // transformers refuses a Llama or Gemma whose hidden size its heads do not divide, even where head_dim is given.
  const bool strict = gpt2 || config.family == ModelFamily::llama || is_gemma(config.family);
  if ((strict || (derived && config.family != ModelFamily::qwen3)) && config.hidden % config.heads != 0) {
    keys.fail(gpt2 ? "n_head" : "num_attention_heads",
              fmt::format("the hidden size {} must be a multiple of the {} heads", config.hidden, config.heads));
  }
  if (config.heads % config.kv_heads != 0) {
    keys.fail("num_key_value_heads", fmt::format("the {} heads must be a multiple of the {} key and value heads",
                                                 config.heads, config.kv_heads));
  }
  if (!gpt2 && config.head_dim % 2 != 0) {
    keys.fail("head_dim", fmt::format("rotary embeddings need an even one, it comes to {}", config.head_dim));
  }
}

// Every size alone is bounded, but layers of the largest sizes add up to more than can be counted.
void check_total(const ModelConfig& config, const std::string& source) {
  constexpr double kMost = 0x1p58;  // at 16 bytes of states a parameter: 62 bits of bytes
  ModelConfig one_layer = config;
  one_layer.layers = 1;
  double total = 0;
  for (const ParameterShape& parameter : parameter_shapes(one_layer)) {
    total += static_cast<double>(parameter.numel()) * (parameter.block == 1 ? static_cast<double>(config.layers) : 1.0);
  }
  require(total <= kMost,
          fmt::format("{}: these sizes make {:.3g} parameters; at most {:.3g} can be counted", source, total, kMost));
}

}  // namespace

std::string_view to_string(ModelFamily family) {
  for (const FamilyNames& names : kFamilies) {
    if (names.family == family) return names.type;
  }
  return "unknown";
}

ModelConfig ModelConfig::parse(const std::string& json, const std::string& source) {
  Json object;
  try {
    object = parse_strict_object(json);
  } catch (const JsonFault& fault) {
    throw InvalidArgument(fmt::format("{}: not a model configuration: {}", source, fault.what()));
  }
  ModelConfig config;
  {
    ConfigKeys type(object, source);
    config.family = read_family(type).family;
  }
  if (config.family == ModelFamily::gpt2) object = with_gpt2_names(object, source);
  ConfigKeys keys(object, source);
  check_architectures(keys, read_family(keys));
  config.family == ModelFamily::gpt2 ? read_gpt2(keys, config) : read_llama_like(keys, config);
  read_common(keys, config);
  keys.reject_unknown(harmless_config_keys());
  check_sizes(keys, config);
  check_total(config, source);
  return config;
}

ModelConfig ModelConfig::load(const std::filesystem::path& file_or_folder) {
  constexpr std::size_t kLargest = 16 << 20;
  std::error_code ignored;  // what cannot be looked at fails below, when it is opened
  const bool folder = std::filesystem::is_directory(file_or_folder, ignored);
  const MappedFile file(folder ? file_or_folder / "config.json" : file_or_folder);
  const auto bytes = file.bytes();
  if (bytes.size() > kLargest) {
    throw FileError(fmt::format("{}: {} bytes are no model configuration: expected at most {}", file.path().string(),
                                bytes.size(), kLargest));
  }
  return parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, file.path().string());
}

}  // namespace spillway
