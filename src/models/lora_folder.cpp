// SPDX-License-Identifier: Apache-2.0
// PEFT's folders: adapter_config.json and adapter_model.safetensors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <system_error>

#include "core/printable.h"
#include "formats/atomic_file.h"
#include "models/lora_editor.h"
#include "models/parameter_values.h"
#include "models/scalar_type.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/models/lora.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr const char* kPrefix = "base_model.model.";  // PEFT's wrappers around the model

std::vector<std::string> names_of(const std::vector<LoraModule>& modules) {
  std::vector<std::string> names;
  for (const LoraModule& module : modules) names.push_back(module.name);
  return names;
}

// PEFT knows no patterns: the ends of names where these say the same, else all names.
std::vector<std::string> peft_targets(const ModelConfig& config, const LoraOptions& options) {
  const std::vector<std::string> names = names_of(lora_modules(config, options));
  std::set<std::string> ends;
  for (const std::string& name : names) ends.insert(name.substr(name.rfind('.') + 1));
  LoraOptions short_names = options;
  short_names.targets.assign(ends.begin(), ends.end());
  return names_of(lora_modules(config, short_names)) == names ? short_names.targets : names;
}

nlohmann::ordered_json whole_if_possible(double number) {
  constexpr double kLargestExact = 9007199254740992.0;  // 2^53
  if (std::floor(number) == number && number <= kLargestExact) return static_cast<std::int64_t>(number);
  return number;
}

std::string adapter_config(const ModelConfig& config, const LoraOptions& options, const std::string& base_model) {
  nlohmann::ordered_json json;
  json["peft_type"] = "LORA";
  json["task_type"] = "CAUSAL_LM";
  if (base_model.empty()) {
    json["base_model_name_or_path"] = nullptr;
  } else {
    json["base_model_name_or_path"] = base_model;
  }
  json["inference_mode"] = true;
  json["r"] = options.rank;
  json["lora_alpha"] = whole_if_possible(options.alpha);
  json["lora_dropout"] = options.dropout;
  json["use_rslora"] = options.rank_stabilized;
  json["target_modules"] = peft_targets(config, options);
  json["fan_in_fan_out"] = config.family == ModelFamily::gpt2;
  json["bias"] = "none";
  json["init_lora_weights"] = true;
  json["modules_to_save"] = nullptr;
  // A path may hold any bytes.
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::vector<TensorSource> adapter_sources(const ParameterValues& values, std::optional<DType> dtype, DType own) {
  std::vector<TensorSource> sources;
  for (const std::string& name : values.names()) {
    if (!is_adapter(name)) continue;
    values.require_readable(name);
    sources.push_back(tensor_source(kPrefix + name, values.shape(name), dtype.value_or(own),
                                    [&values, name] { return values.read(name); }));
  }
  return sources;
}

// Goes through what the file must hold, and collects everything that does not fit before it throws.
class AdapterReader {
 public:
  AdapterReader(const fs::path& file, const std::vector<ParameterShape>& expected) : reader_(file) {
    std::set<std::string> unread(reader_.names().begin(), reader_.names().end());
    std::vector<std::string> missing, misfits;
    for (const ParameterShape& parameter : expected) {
      const std::string name = kPrefix + parameter.name;
      if (unread.erase(name) == 0) {
        missing.push_back(name);
      } else if (const std::string misfit = misfit_of(name, parameter.shape); !misfit.empty()) {
        misfits.push_back(misfit);
      }
    }
    if (missing.empty() && unread.empty() && misfits.empty()) return;
    std::string message =
        fmt::format("{}: the adapters are not those that {} describes for this model.", file.string(), kConfigFile);
    list(message, "Missing", missing);
    list(message, "Unexpected", {unread.begin(), unread.end()});
    list(message, "Of another shape or type", misfits);
    throw FileError(message);
  }

  void copy(const std::string& name, torch::Tensor& parameter) const {
    const TensorView view = reader_.tensor(kPrefix + name);
    const DType type = from_scalar_type(parameter.scalar_type());
    torch::Tensor values = at::empty(parameter.sizes(), parameter.options().device(torch::kCPU).requires_grad(false));
    convert_elements(view.dtype, view.bytes, type,
                     std::span(static_cast<std::byte*>(values.data_ptr()), values.nbytes()), values.numel());
    const torch::NoGradGuard no_grad;
    parameter.copy_(values);
  }

 private:
  std::string misfit_of(const std::string& name, const std::vector<std::int64_t>& shape) const {
    const TensorView view = reader_.tensor(name);
    if (view.shape != shape) {
      return fmt::format("{} [{}], expected [{}]", name, fmt::join(view.shape, ", "), fmt::join(shape, ", "));
    }
    if (view.dtype != DType::f32 && view.dtype != DType::bf16 && view.dtype != DType::f16) {
      return fmt::format("{} of type {}, expected fp32, bf16 or fp16", name, to_string(view.dtype));
    }
    return {};
  }

  static void list(std::string& message, const char* what, const std::vector<std::string>& items) {
    constexpr std::size_t kMost = 40;
    if (items.empty()) return;
    const std::span shown(items.data(), std::min(items.size(), kMost));
    message += fmt::format("\n  {} ({}): {}{}", what, items.size(),
                           printable(fmt::format("{}", fmt::join(shown, "; "))), items.size() > kMost ? "; ..." : "");
  }

  SafetensorsReader reader_;
};

}  // namespace

void save_lora(const CausalLM& model, const fs::path& folder, const LoraSaveOptions& options) {
  require(model.lora().has_value(),
          "The model has no LoRA adapters to save: add_lora gives it some; save_causal_lm saves the model itself.");
  const ParameterValues values(model, options.weights);
  const DType own = from_scalar_type(model.parameters().front().scalar_type());
  if (!options.write) return ask_for(adapter_sources(values, options.dtype, own));
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw FileError(fmt::format("{}: cannot make this folder: {}", folder.string(), error.message()));
  const std::string text = adapter_config(model.config(), *model.lora(), options.base_model);
  AtomicFile config(folder / kConfigFile);
  config.write(std::as_bytes(std::span(text)));
  config.finish();
  write_safetensors(folder / kWeightsFile, adapter_sources(values, options.dtype, own));
  config.publish();
}

void load_lora(CausalLM& model, const fs::path& folder) {
  LoraEditor editor(model);
  const LoraOptions options = LoraOptions::load(folder / kConfigFile);
  const std::vector<ParameterShape> expected = lora_parameter_shapes(model.config(), options);
  const AdapterReader reader(folder / kWeightsFile, expected);
  for (auto& [name, parameter] : editor.add(options)) reader.copy(name, parameter);
}

}  // namespace spillway
