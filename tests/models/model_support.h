// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/models/causal_lm.h"

namespace spillway::test {

namespace fs = std::filesystem;

inline fs::path golden(const std::string& name) {
  return fs::path(SPILLWAY_SOURCE_DIR) / "tests" / "golden" / name;
}

/// A new folder that goes away with its object.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (fs::temp_directory_path() / "spillway-models-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const fs::path& path() const { return path_; }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

inline std::string read_text(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return std::move(text).str();
}

/// A copy of an fp32 or int32 tensor of a file.
inline torch::Tensor read_tensor(const SafetensorsReader& reader, const std::string& name) {
  const TensorView view = reader.tensor(name);
  torch::Tensor tensor = torch::empty(view.shape, view.dtype == DType::i32 ? torch::kInt : torch::kFloat);
  if (tensor.nbytes() != view.bytes.size()) throw std::runtime_error(name + " is neither fp32 nor int32");
  std::memcpy(tensor.data_ptr(), view.bytes.data(), view.bytes.size());
  return tensor;
}

inline double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a.to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

/// A small Llama: two layers, four heads of eight that share two keys.
inline ModelConfig small_llama() {
  ModelConfig config;
  config.family = ModelFamily::llama;
  config.vocabulary = 64;
  config.hidden = 32;
  config.intermediate = 48;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.max_position = 32;
  config.activation = Activation::silu;
  return config;
}

inline ModelConfig small_gpt2() {
  ModelConfig config = small_llama();
  config.family = ModelFamily::gpt2;
  config.intermediate = 128;
  config.kv_heads = 4;
  config.activation = Activation::gelu_tanh;
  config.tied_head = true;
  config.attention_bias = config.attention_output_bias = config.mlp_bias = true;
  return config;
}

/// A small Gemma 2 or 3: the first layer slides; scores and logits are bent where the family bends them.
inline ModelConfig small_gemma(ModelFamily family) {
  ModelConfig config = small_llama();
  const bool second = family == ModelFamily::gemma2;
  config.family = family;
  config.activation = Activation::gelu_tanh;
  config.norm_plus_one = config.branch_norms = config.scale_embedding = true;
  config.query_pre_attn_scalar = 12;
  config.qk_norm = !second;
  config.sliding_window = 6;
  config.layer_slides = {true, false};
  config.logit_softcap = 4;
  if (second) config.attention_softcap = 2;
  if (!second) config.sliding_rope_theta = 500;
  return config;
}

/// A small model of any family, with what makes it different from the others.
inline ModelConfig small_model(ModelFamily family) {
  if (family == ModelFamily::gpt2) return small_gpt2();
  if (family == ModelFamily::gemma2 || family == ModelFamily::gemma3) return small_gemma(family);
  ModelConfig config = small_llama();
  config.family = family;
  config.attention_bias = family == ModelFamily::qwen2;
  config.qk_norm = family == ModelFamily::qwen3;
  if (family == ModelFamily::mistral || family == ModelFamily::qwen3) config.sliding_window = 6;
  if (family == ModelFamily::qwen3) config.layer_slides = {false, true};
  return config;
}

inline const ModelFamily kAllFamilies[] = {ModelFamily::gpt2,  ModelFamily::llama, ModelFamily::mistral,
                                           ModelFamily::qwen2, ModelFamily::qwen3, ModelFamily::gemma2,
                                           ModelFamily::gemma3};

/// Token numbers that a seed gives, the same in every run.
inline torch::Tensor some_tokens(std::int64_t batch, std::int64_t length, std::int64_t vocabulary = 64) {
  return (torch::arange(batch * length) * 37 + 11).remainder(vocabulary).view({batch, length});
}

/// Moves every weight, so that no norm stands at one and no bias at zero.
inline void perturb(CausalLM& model) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : model.parameters()) {
    const auto numbers = torch::arange(parameter.numel(), torch::kFloat);
    parameter.add_((numbers * 1.7).sin().mul_(0.1).view(parameter.sizes()).to(parameter.scalar_type()));
  }
}

/// A model none of whose weights are what it starts from.
inline std::shared_ptr<CausalLM> perturbed(const ModelConfig& config, DType dtype = DType::f32) {
  auto model = make_causal_lm(config, 2, dtype);
  perturb(*model);
  return model;
}

/// What an error of the library says that `action` throws.
inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline bool equal_parameters(const CausalLM& a, const CausalLM& b) {
  const auto left = a.named_parameters(), right = b.named_parameters();
  if (left.size() != right.size()) return false;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i].key() != right[i].key() || !torch::equal(left[i].value(), right[i].value())) return false;
  }
  return true;
}

}  // namespace spillway::test
