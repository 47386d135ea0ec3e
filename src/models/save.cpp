// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <functional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "formats/atomic_file.h"
#include "formats/mapped_file.h"
#include "models/config_json.h"
#include "models/lora_editor.h"
#include "models/parameter_values.h"
#include "models/scalar_type.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/models/causal_lm.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

// What a Hugging Face folder holds beside weights and config.json that a program needs to use the model.
constexpr std::array kCompanions = {"generation_config.json", "tokenizer.json",      "tokenizer_config.json",
                                    "tokenizer.model",        "vocab.json",          "merges.txt",
                                    "added_tokens.json",      "chat_template.jinja", "special_tokens_map.json",
                                    "chat_template.json"};

std::string read_text(const fs::path& file) {
  const MappedFile mapped(file);
  const std::span<const std::byte> bytes = mapped.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

AtomicFile write_aside(const fs::path& file, const std::string& text) {
  AtomicFile aside(file);
  aside.write(std::as_bytes(std::span(text)));
  aside.finish();
  return aside;
}

std::string config_text(const CausalLM& model, const fs::path& source, DType dtype) {
  if (source.empty()) return config_json(model.config(), dtype);
  const fs::path file = source / "config.json";
  const std::string text = read_text(file);
  // Written by one function, two configurations have equal texts where they describe the same model.
  const bool same = config_json(ModelConfig::parse(text, file.string()), dtype) == config_json(model.config(), dtype);
  require(same, fmt::format("{} does not describe the model that is saved: give the folder that the model was loaded "
                            "from, or none to have a config.json written from the model.",
                            file.string()));
  return config_json_with_dtype(text, dtype);
}

void copy_companions(const fs::path& source, const fs::path& folder, std::vector<AtomicFile>& out) {
  if (source.empty() || fs::equivalent(source, folder)) return;
  for (const char* name : kCompanions) {
    std::error_code error;  // what is no file is nobody's tokenizer: a folder, a pipe that nobody writes to
    if (fs::is_regular_file(source / name, error)) out.push_back(write_aside(folder / name, read_text(source / name)));
  }
}

// `values` outlives the sources. Adapters are merged into their weights, never written themselves.
std::vector<TensorSource> tensor_sources(const CausalLM& model, DType dtype, const ParameterValues& values) {
  const WeightLayout layout = model.config().family == ModelFamily::gpt2 ? WeightLayout::in_out : WeightLayout::out_in;
  std::vector<TensorSource> sources;
  for (const std::string& name : values.names()) {
    values.require_readable(name);
    if (is_adapter(name)) continue;
    std::function<torch::Tensor()> read = [&values, name] { return values.read(name); };
    const std::string module = name.substr(0, name.rfind('.'));
    const std::string a = fmt::format("{}{}", module, kLoraA), b = fmt::format("{}{}", module, kLoraB);
    if (name.ends_with(".weight") && values.contains(a)) {
      read = [&values, name, a, b, layout, scaling = model.lora()->scaling()] {
        return merged_weight(values.read(name), values.read(a), values.read(b), scaling, layout);
      };
    }
    sources.push_back(tensor_source(name, values.shape(name), dtype, std::move(read)));
  }
  return sources;
}

}  // namespace

void save_causal_lm(const CausalLM& model, const fs::path& folder, const SaveOptions& options) {
  const DType dtype = options.dtype.value_or(from_scalar_type(model.parameters().front().scalar_type()));
  to_scalar_type(dtype);  // refuses what is not a type of models
  require(!model.lora() || options.merge_lora,
          "The model has LoRA adapters: save_lora writes these alone, as a PEFT folder; SaveOptions::merge_lora writes "
          "the plain model that computes the same.");
  const std::string config = config_text(model, options.source_folder, dtype);
  const ParameterValues values(model, options.weights);
  if (!options.write) return ask_for(tensor_sources(model, dtype, values));
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw FileError(fmt::format("{}: cannot make this folder: {}", folder.string(), error.message()));
  // Complete on disk before the weights are: a save that finds no room for all of it leaves the earlier one whole.
  std::vector<AtomicFile> beside;
  beside.push_back(write_aside(folder / "config.json", config));
  copy_companions(options.source_folder, folder, beside);
  write_safetensors_folder(folder, tensor_sources(model, dtype, values), options.max_shard);
  for (AtomicFile& file : beside) file.publish();
}

}  // namespace spillway
