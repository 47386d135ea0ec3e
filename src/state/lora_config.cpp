// SPDX-License-Identifier: Apache-2.0
// PEFT's adapter_config.json.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <system_error>

#include "core/printable.h"
#include "core/strict_json.h"
#include "formats/mapped_file.h"
#include "spillway/core/error.h"
#include "spillway/state/lora_options.h"
#include "state/config_keys.h"

namespace spillway {
namespace {

using Json = nlohmann::json;

// Where the adapters come from, and settings of what is off: these may hold anything.
const std::set<std::string_view> kHarmless = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",
    "peft_version", "qalora_group_size",       "revision"};

// Keys that change what adapters compute, with the values that do not.
struct OnlyValues {
  const char* key;
  const char* allowed;
};
constexpr std::array kOnly = {
    OnlyValues{"task_type", R"([null, "CAUSAL_LM"])"},
    OnlyValues{"bias", R"(["none"])"},
    // Others store a base that differs from the model's own.
    OnlyValues{"init_lora_weights", R"([true, false, null, "gaussian", "orthogonal", "eva"])"},
};

bool is_without_effect(const Json& value) {
  return value.is_null() || value == Json(false) || (value.is_structured() && value.empty());
}

std::vector<std::string> read_targets(ConfigKeys& keys) {
  const Json* value = keys.find("target_modules");
  if (value == nullptr || value->is_null()) return {};
  if (*value == Json("all-linear")) return {"all-linear"};
  constexpr const char* kExpected =
      "expected a list of module names or \"all-linear\"; write a regular expression out as the names that it matches";
  if (!value->is_array() || value->empty()) keys.fail("target_modules", kExpected);
  std::vector<std::string> targets;
  for (const Json& one : *value) {
    if (!one.is_string()) keys.fail("target_modules", kExpected);
    targets.push_back(one.get<std::string>());
    const bool control = std::any_of(targets.back().begin(), targets.back().end(), is_control);
    if (control || targets.back().find_first_of("*?") != std::string::npos) keys.fail("target_modules", kExpected);
  }
  return targets;
}

void refuse_what_has_an_effect(ConfigKeys& keys) {
  for (const auto& [key, allowed] : kOnly) keys.only(key, allowed);
  for (const auto& [key, value] : keys.object().items()) {
    if (is_without_effect(value)) keys.find(key);
  }
  for (const char* key :
       {"alpha_pattern", "exclude_modules", "layer_replication", "layers_pattern", "layers_to_transform", "lora_bias",
        "modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_dora", "use_qalora"}) {
    const Json* value = keys.find(key);
    if (value != nullptr && !is_without_effect(*value)) {
      keys.fail(key, "Spillway runs plain LoRA of one rank on linear layers only");
    }
  }
  keys.reject_unknown(kHarmless);
}

}  // namespace

LoraOptions LoraOptions::parse(const std::string& json, const std::string& source) {
  Json object;
  try {
    object = parse_strict_object(json);
  } catch (const JsonFault& fault) {
    throw InvalidArgument(fmt::format("{}: not a configuration of adapters: {}", source, fault.what()));
  }
  ConfigKeys keys(object, source);
  if (keys.text("peft_type", "") != "LORA") keys.fail("peft_type", "Spillway reads adapters of type \"LORA\" only");
  LoraOptions options;
  options.rank = keys.integer("r", options.rank, {1, 1 << 20});
  options.alpha = keys.number("lora_alpha", options.alpha, {1e-30, 1e30});
  options.dropout = keys.number("lora_dropout", options.dropout, {0, 1});
  options.rank_stabilized = keys.boolean("use_rslora", options.rank_stabilized);
  options.targets = read_targets(keys);
  keys.boolean("fan_in_fan_out", false);  // follows from the layer, whatever stands here: PEFT corrects it too
  refuse_what_has_an_effect(keys);
  try {
    options.validate();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", source, error.what()));
  }
  return options;
}

LoraOptions LoraOptions::load(const std::filesystem::path& file_or_folder) {
  constexpr std::size_t kLargest = 16 << 20;
  std::error_code ignored;  // what cannot be looked at fails below, when it is opened
  const bool folder = std::filesystem::is_directory(file_or_folder, ignored);
  const MappedFile file(folder ? file_or_folder / "adapter_config.json" : file_or_folder);
  const auto bytes = file.bytes();
  if (bytes.size() > kLargest) {
    throw FileError(fmt::format("{}: {} bytes are no configuration of adapters: expected at most {}",
                                file.path().string(), bytes.size(), kLargest));
  }
  return parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, file.path().string());
}

}  // namespace spillway
