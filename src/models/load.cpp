// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <unordered_map>

#include "core/printable.h"
#include "models/scalar_type.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/models/causal_lm.h"

namespace spillway {
namespace {

constexpr std::string_view kHead = "lm_head.weight";

std::string_view base_prefix(ModelFamily family) {
  return family == ModelFamily::gpt2 ? "transformer." : "model.";
}

std::string_view embedding_name(ModelFamily family) {
  return family == ModelFamily::gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
}

// Buffers that older files of these families carry: computed from the configuration, so not read.
bool is_known_buffer(const std::string& name) {
  for (const std::string_view end : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
    if (name.size() > end.size() && name.ends_with(end)) return true;
  }
  return false;
}

// Goes through a model's parameters and a folder's tensors, and collects everything that does not fit before it throws.
class WeightReader {
 public:
  WeightReader(const CausalLM& model, const std::filesystem::path& folder)
      : model_(model), reader_(folder), unread_(reader_.names().begin(), reader_.names().end()) {}

  /// Throws: FileError listing what does not fit.
  void check() {
    for (const auto& item : model_.named_parameters()) plan(item.key(), item.value());
    check_tied_head();
    for (const std::string& name : unread_) {
      if (!is_known_buffer(name)) unexpected_.push_back(name);
    }
    throw_if_any_misfit();
  }

  void fill_model() {
    for (auto& item : model_.named_parameters()) copy(planned_.at(item.key()), item.value());
  }

  /// A copy in the file's type; undefined for a name that was not planned.
  torch::Tensor tensor(const std::string& name) const {
    const auto found = planned_.find(name);
    if (found == planned_.end()) return {};
    const TensorView& view = found->second;
    torch::Tensor out = torch::empty(view.shape, torch::TensorOptions().dtype(to_scalar_type(view.dtype)));
    if (!view.bytes.empty()) std::memcpy(out.mutable_data_ptr(), view.bytes.data(), view.bytes.size());
    return out;
  }

 private:
  // A base model's file has the names without the prefix that the full model gives them.
  std::optional<std::string> take_stored_name(const std::string& name) {
    const std::string_view prefix = base_prefix(model_.config().family);
    if (unread_.erase(name) > 0) return name;
    if (!name.starts_with(prefix)) return std::nullopt;
    std::string bare = name.substr(prefix.size());
    if (unread_.erase(bare) > 0) return bare;
    return std::nullopt;
  }

  void plan(const std::string& name, const torch::Tensor& parameter) {
    const std::optional<std::string> stored = take_stored_name(name);
    if (!stored) {
      missing_.push_back(name);
      return;
    }
    const TensorView view = reader_.tensor(*stored);
    if (view.shape != parameter.sizes().vec()) {
      misfits_.push_back(fmt::format("{} [{}], expected [{}]", view.name, fmt::join(view.shape, ", "),
                                     fmt::join(parameter.sizes(), ", ")));
    } else if (view.dtype != DType::f32 && view.dtype != DType::bf16 && view.dtype != DType::f16) {
      misfits_.push_back(fmt::format("{} of type {}, expected fp32, bf16 or fp16", view.name, to_string(view.dtype)));
    } else {
      planned_.emplace(name, view);
    }
  }

  void check_tied_head() {
    if (!model_.config().tied_head || unread_.erase(std::string(kHead)) == 0) return;
    const TensorView stored = reader_.tensor(std::string(kHead));
    const std::string name(embedding_name(model_.config().family));
    const auto embedding = planned_.find(name);
    if (embedding == planned_.end()) return;  // reported as missing or misshapen
    const TensorView& tied = embedding->second;
    const bool equal = stored.dtype == tied.dtype && stored.shape == tied.shape &&
                       std::memcmp(stored.bytes.data(), tied.bytes.data(), stored.bytes.size()) == 0;
    if (!equal) {
      throw FileError(
          fmt::format("{}: the configuration ties the head to the embedding (tie_word_embeddings), but {} "
                      "and {} differ. Set tie_word_embeddings to false to use both, or remove {}.",
                      reader_.path().string(), kHead, tied.name, kHead));
    }
  }

  void throw_if_any_misfit() const {
    if (missing_.empty() && unexpected_.empty() && misfits_.empty()) return;
    std::string message = fmt::format("{}: the weights are not those of the {} model that its configuration describes.",
                                      reader_.path().string(), to_string(model_.config().family));
    list(message, "Missing", missing_);
    list(message, "Unexpected", unexpected_);
    list(message, "Of another shape or type", misfits_);
    throw FileError(message);
  }

  static void list(std::string& message, const char* what, const std::vector<std::string>& items) {
    if (items.empty()) return;
    message += fmt::format("\n  {} ({}): {}", what, items.size(), printable(fmt::format("{}", fmt::join(items, "; "))));
  }

  static void copy(const TensorView& view, const torch::Tensor& parameter) {
    const std::span target(static_cast<std::byte*>(parameter.data_ptr()), parameter.nbytes());
    convert_elements(view.dtype, view.bytes, from_scalar_type(parameter.scalar_type()), target, parameter.numel());
  }

  const CausalLM& model_;
  SafetensorsReader reader_;
  std::set<std::string> unread_;
  std::unordered_map<std::string, TensorView> planned_;  // by the parameter's name
  std::vector<std::string> missing_, unexpected_, misfits_;
};

}  // namespace

std::shared_ptr<CausalLM> load_causal_lm(const std::filesystem::path& folder, const LoadOptions& options) {
  std::shared_ptr<CausalLM> model = empty_causal_lm(ModelConfig::load(folder), options.dtype);
  WeightReader reader(*model, folder);
  reader.check();
  reader.fill_model();
  return model;
}

std::function<torch::Tensor(const std::string& name)> folder_weights(const CausalLM& model,
                                                                     const std::filesystem::path& folder) {
  const auto reader = std::make_shared<WeightReader>(model, folder);
  reader->check();
  return [reader](const std::string& name) { return reader->tensor(name); };
}

}  // namespace spillway
