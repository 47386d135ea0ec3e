// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/lora_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "spillway/core/error.h"
#include "spillway/core/nearest.h"
#include "spillway/core/pattern.h"

namespace spillway {
namespace {

constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kAllLinear = "all-linear";

// Every matrix inside a layer is one of a linear layer: embeddings and head have blocks of their own.
std::vector<LoraModule> linear_layers(const ModelConfig& config) {
  std::vector<LoraModule> found;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    const bool in_layer = parameter.block >= 1 && parameter.block <= config.layers;
    if (!in_layer || parameter.shape.size() != 2) continue;
    const bool in_out = config.family == ModelFamily::gpt2;  // its Conv1D
    found.push_back({.name = parameter.name.substr(0, parameter.name.size() - kWeight.size()),
                     .in = parameter.shape[in_out ? 0 : 1],
                     .out = parameter.shape[in_out ? 1 : 0],
                     .block = parameter.block});
  }
  return found;
}

// PEFT's rule: the whole name, or its end after a dot; and patterns.
bool is_target(std::string_view target, std::string_view module) {
  if (target == kAllLinear || matches(target, module)) return true;
  const bool longer = module.size() > target.size();
  return longer && module.ends_with(target) && module[module.size() - target.size() - 1] == '.';
}

[[noreturn]] void fail_unmatched(const std::string& target, const std::vector<LoraModule>& layers) {
  std::vector<std::string> names;
  for (const LoraModule& layer : layers) {
    const std::string end = layer.name.substr(layer.name.rfind('.') + 1);
    if (std::find(names.begin(), names.end(), end) == names.end()) names.push_back(end);
  }
  std::string ends;
  for (const std::string& name : names) ends += (ends.empty() ? "" : ", ") + name;
  for (const LoraModule& layer : layers) names.push_back(layer.name);
  throw InvalidArgument(
      fmt::format("The LoRA target \"{}\" matches no linear layer of the model's layers; the nearest name is \"{}\". "
                  "Adapted can be: {}.",
                  target.substr(0, 200), nearest_name(target, names), ends));
}

}  // namespace

double LoraOptions::scaling() const {
  const auto wide = static_cast<double>(rank);
  return alpha / (rank_stabilized ? std::sqrt(wide) : wide);
}

void LoraOptions::validate() const {
  constexpr std::int64_t kHighestRank = 1 << 20;
  constexpr double kLowestAlpha = 1e-30, kHighestAlpha = 1e30;  // the scale is neither zero nor infinite
  constexpr std::size_t kMostTargets = 10'000;
  require(rank >= 1 && rank <= kHighestRank,
          fmt::format("A LoRA rank of {} is out of range: expected 1 to {}.", rank, kHighestRank));
  require(alpha >= kLowestAlpha && alpha <= kHighestAlpha,
          fmt::format("A LoRA alpha of {} is out of range: expected {} to {}.", alpha, kLowestAlpha, kHighestAlpha));
  require(dropout >= 0 && dropout < 1,
          fmt::format("A LoRA dropout of {} is out of range: expected at least 0 and less than 1.", dropout));
  require(targets.size() <= kMostTargets,
          fmt::format("{} LoRA targets are too many: expected at most {}.", targets.size(), kMostTargets));
}

std::vector<std::string> default_lora_targets(ModelFamily family) {
  if (family == ModelFamily::gpt2) return {"c_attn"};
  return {"q_proj", "v_proj"};
}

std::vector<LoraModule> lora_modules(const ModelConfig& config, const LoraOptions& options) {
  options.validate();
  const std::vector<LoraModule> layers = linear_layers(config);
  std::vector<bool> chosen(layers.size());
  for (const std::string& target : options.targets.empty() ? default_lora_targets(config.family) : options.targets) {
    bool any = false;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (!is_target(target, layers[i].name)) continue;
      chosen[i] = any = true;
    }
    if (!any) fail_unmatched(target, layers);
  }
  std::vector<LoraModule> adapted;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (chosen[i]) adapted.push_back(layers[i]);
  }
  return adapted;
}

std::vector<ParameterShape> lora_parameter_shapes(const ModelConfig& config, const LoraOptions& options) {
  std::vector<ParameterShape> shapes;
  for (const LoraModule& module : lora_modules(config, options)) {
    shapes.push_back({module.name + ".lora_A.weight", {options.rank, module.in}, module.block});
    shapes.push_back({module.name + ".lora_B.weight", {module.out, options.rank}, module.block});
  }
  return shapes;
}

}  // namespace spillway
