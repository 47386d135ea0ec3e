// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "formats/atomic_file.h"
#include "models/config_json.h"
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
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) throw FileError(fmt::format("{}: cannot be read: {}.", file.string(), std::strerror(errno)));
  return std::move(text).str();
}

void write_text(const fs::path& file, const std::string& text) {
  AtomicFile aside(file);
  aside.write(std::as_bytes(std::span(text)));
  aside.finish();
  aside.publish();
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

void copy_companions(const fs::path& source, const fs::path& folder) {
  if (source.empty() || fs::equivalent(source, folder)) return;
  for (const char* name : kCompanions) {
    if (fs::exists(source / name)) write_text(folder / name, read_text(source / name));
  }
}

bool is_resident(const torch::Tensor& tensor) {
  return tensor.numel() == 0 || (tensor.storage().data() != nullptr && tensor.storage().nbytes() >= tensor.nbytes());
}

void fill(const torch::Tensor& values, const std::string& name, at::IntArrayRef shape, DType dtype,
          std::span<std::byte> target) {
  require(values.sizes() == shape, fmt::format("The weights given for {} have shape {}, the parameter has {}.", name,
                                               c10::str(values.sizes()), c10::str(shape)));
  const torch::Tensor host = values.detach().to(torch::kCPU).contiguous();
  const std::span source(static_cast<const std::byte*>(host.data_ptr()), host.nbytes());
  convert_elements(from_scalar_type(host.scalar_type()), source, dtype, target, host.numel());
}

std::vector<TensorSource> tensor_sources(const CausalLM& model, DType dtype, const SaveOptions& options) {
  std::vector<TensorSource> sources;
  for (const auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    const torch::Tensor parameter = item.value();
    if (!options.weights && !is_resident(parameter)) {
      throw StateError(
          fmt::format("The model cannot be saved: the memory of {} is released. Save through the engine "
                      "that holds its weights, or pass SaveOptions::weights.",
                      name));
    }
    sources.push_back({.name = name,
                       .dtype = dtype,
                       .shape = parameter.sizes().vec(),
                       .fill = [name, parameter, dtype, weights = options.weights](std::span<std::byte> target) {
                         fill(weights ? weights(name) : parameter, name, parameter.sizes(), dtype, target);
                       }});
  }
  return sources;
}

}  // namespace

void save_causal_lm(const CausalLM& model, const fs::path& folder, const SaveOptions& options) {
  const DType dtype = options.dtype.value_or(from_scalar_type(model.parameters().front().scalar_type()));
  to_scalar_type(dtype);  // refuses what is not a type of models
  const std::string config = config_text(model, options.source_folder, dtype);
  write_safetensors_folder(folder, tensor_sources(model, dtype, options), options.max_shard);
  write_text(folder / "config.json", config);
  copy_companions(options.source_folder, folder);
}

}  // namespace spillway
