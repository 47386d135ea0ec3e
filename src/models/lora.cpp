// SPDX-License-Identifier: Apache-2.0
#include "spillway/models/lora.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <cmath>
#include <unordered_map>

#include "models/lora_editor.h"
#include "models/parameter_values.h"
#include "spillway/core/error.h"

namespace spillway {

torch::Tensor merged_weight(const torch::Tensor& weight, const torch::Tensor& a, const torch::Tensor& b, double scaling,
                            WeightLayout layout) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor update = at::mm(b.to(torch::kFloat), a.to(torch::kFloat)).mul_(scaling);
  return weight.to(torch::kFloat) + (layout == WeightLayout::out_in ? update : update.t());
}

LoraEditor::LoraEditor(CausalLM& model) : model_(model) {
  if (model.block_call_) {
    throw StateError(
        "The model's adapters cannot change while its blocks are bound: change them before the engine is made or after "
        "it is gone, and unbind a call of your own with set_block_call({}).");
  }
}

std::vector<std::pair<std::string, torch::Tensor>> LoraEditor::add(const LoraOptions& options) {
  require(!model_.lora_,
          "The model has LoRA adapters already: merge_lora or remove_lora first, or add them to a model without.");
  const std::vector<LoraModule> targets = lora_modules(model_.config(), options);
  std::unordered_map<std::string, std::shared_ptr<Dense>> layers;
  for (const auto& item : model_.named_modules()) {
    if (auto layer = std::dynamic_pointer_cast<Dense>(item.value())) layers.emplace(item.key(), std::move(layer));
  }
  for (torch::Tensor& parameter : model_.parameters()) parameter.set_requires_grad(false);
  std::vector<std::pair<std::string, torch::Tensor>> added;
  for (const LoraModule& target : targets) {
    const auto layer = layers.find(target.name);
    check(layer != layers.end(), "every LoRA target is a linear layer of the model");
    layer->second->add_adapter(
        options.rank, {.scaling = options.scaling(), .dropout = options.dropout, .generator = model_.dropout()});
    for (const auto& item : layer->second->named_parameters()) {
      const std::string name = target.name + "." + item.key();
      if (is_adapter(name)) added.emplace_back(name, item.value());
    }
  }
  model_.lora_ = options;
  model_.name_blocks();
  return added;
}

std::vector<std::shared_ptr<Dense>> LoraEditor::adapted() const {
  std::vector<std::shared_ptr<Dense>> layers;
  for (const auto& module : model_.modules()) {
    const auto layer = std::dynamic_pointer_cast<Dense>(module);
    if (layer && layer->has_adapter()) layers.push_back(layer);
  }
  return layers;
}

void LoraEditor::remove(bool merge) {
  require(model_.lora_.has_value(), "The model has no LoRA adapters: add_lora and load_lora give it some.");
  const torch::NoGradGuard no_grad;
  if (merge) {
    const ParameterValues values(model_, {});
    for (const std::string& name : values.names()) values.require_readable(name);
    for (const auto& layer : adapted()) {
      const auto parameters = layer->named_parameters();
      layer->weight.copy_(merged_weight(layer->weight, parameters["lora_A.weight"], parameters["lora_B.weight"],
                                        model_.lora_->scaling(), layer->layout()));
    }
  }
  for (const auto& layer : adapted()) layer->remove_adapter();
  model_.lora_.reset();
  model_.name_blocks();
}

void add_lora(CausalLM& model, const LoraOptions& options, std::uint64_t seed) {
  auto parameters = LoraEditor(model).add(options);
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (auto& [name, parameter] : parameters) {
    if (parameter.is_meta()) continue;
    if (name.ends_with(kLoraB)) {
      parameter.zero_();
      continue;
    }
    // Kaiming's uniform distribution with a slope of sqrt(5), as linear layers are drawn in PyTorch.
    const double bound = 1 / std::sqrt(static_cast<double>(parameter.size(1)));
    parameter.copy_(at::empty(parameter.sizes(), torch::kFloat).uniform_(-bound, bound, generator));
  }
}

void merge_lora(CausalLM& model) {
  LoraEditor(model).remove(/*merge=*/true);
}

void remove_lora(CausalLM& model) {
  LoraEditor(model).remove(/*merge=*/false);
}

}  // namespace spillway
