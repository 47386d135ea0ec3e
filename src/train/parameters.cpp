// SPDX-License-Identifier: Apache-2.0
#include "train/parameters.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "models/scalar_type.h"
#include "spillway/core/error.h"
#include "spillway/core/pattern.h"
#include "spillway/plan/run_plan.h"
#include "spillway/train/device_scope.h"

namespace spillway {
namespace {

void check_parameter(const std::string& name, const torch::Tensor& tensor, DType precision) {
  require(tensor.defined(), fmt::format("parameter {} is undefined", name));
  require(tensor.layout() == torch::kStrided, fmt::format("parameter {} is sparse; expected a dense tensor", name));
  require(tensor.device().is_cpu(),
          fmt::format("parameter {} is on {}; make the module on the CPU, the engine moves it", name,
                      tensor.device().str()));
  require(tensor.scalar_type() == torch::kFloat || tensor.scalar_type() == to_scalar_type(precision),
          fmt::format("parameter {} is {}, but the configured precision is {}: expected that type, or fp32", name,
                      c10::toString(tensor.scalar_type()), to_string(precision)));
  require(tensor.is_leaf(), fmt::format("parameter {} is the result of an operation (as torch::randn(...) * 0.02 of a "
                                        "tensor that requires gradients is), so gradients would pass it by: make it "
                                        "under NoGradGuard, or detach() it, before it is registered",
                                        name));
  require(torch::autograd::impl::post_acc_grad_hooks(tensor) == nullptr,
          fmt::format("parameter {} already has a hook after its gradient: is another engine using it?", name));
}

bool applies(const GroupRule& rule, const std::string& name, const torch::Tensor& tensor) {
  if (rule.group.max_dims && tensor.dim() > *rule.group.max_dims) return false;
  return matches(rule.group.match, name) && (!rule.applies || rule.applies(name, tensor));
}

int group_of_tensor(const std::string& name, const torch::Tensor& tensor, const Config& config,
                    const std::vector<GroupRule>& rules) {
  for (std::size_t i = 0; i < rules.size(); ++i) {
    if (applies(rules[i], name, tensor)) return static_cast<int>(config.groups.size() + i) + 1;
  }
  return group_of(name, tensor.dim(), config);
}

}  // namespace

void check_embeddings(const torch::nn::Module& model, DType precision, int ranks) {
  if (precision == DType::f32 && ranks == 1) return;
  const auto check_one = [&](const std::string& name, const torch::nn::Module& module) {
    const auto writes = [](const auto* embedding) {
      return embedding != nullptr && embedding->weight.requires_grad() && embedding->options.max_norm().has_value();
    };
    require(!writes(dynamic_cast<const torch::nn::EmbeddingImpl*>(&module)) &&
                !writes(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module)),
            fmt::format("the embedding {} has max_norm, which writes to its weight in every forward: {}; take max_norm "
                        "out, or train in fp32 on one rank",
                        name,
                        ranks > 1 ? "ranks with other rows would write other ones"
                                  : fmt::format("in {} its masters would be rounded each time", to_string(precision))));
  };
  check_one(model.name(), model);
  for (const auto& entry : model.named_modules(std::string(), /*include_self=*/false))
    check_one(entry.key(), *entry.value());
}

std::vector<ModelParameter> collect_parameters(const torch::nn::Module& model, const Config& config,
                                               const std::vector<GroupRule>& rules) {
  std::vector<ModelParameter> out;
  std::unordered_map<const void*, std::size_t> tensors;  // where each stands in `out`
  std::unordered_map<const void*, std::string> storages;
  for (const auto& entry : model.named_parameters()) {
    const torch::Tensor& tensor = entry.value();
    check_parameter(entry.key(), tensor, config.precision);
    const auto [known, first] = tensors.emplace(tensor.unsafeGetTensorImpl(), out.size());
    if (!first) {
      out[known->second].aliases.push_back(entry.key());
      continue;
    }
    const auto [owner, fresh] = storages.emplace(tensor.storage().unsafeGetStorageImpl(), entry.key());
    require(fresh, fmt::format("parameters {} and {} share memory without being the same tensor; register one tensor "
                               "twice instead",
                               owner->second, entry.key()));
    out.push_back(
        {entry.key(), {}, tensor, group_of_tensor(entry.key(), tensor, config, rules), tensor.requires_grad()});
  }
  return out;
}

std::vector<const void*> parameter_identities(const torch::nn::Module& module) {
  std::vector<const void*> out;
  for (const torch::Tensor& parameter : module.parameters()) out.push_back(parameter.unsafeGetTensorImpl());
  return out;
}

void check_parameter_identities(const torch::nn::Module& module, const std::vector<const void*>& known) {
  if (parameter_identities(module) == known) return;
  std::string what = "some are gone";
  for (const auto& entry : module.named_parameters()) {
    if (std::find(known.begin(), known.end(), entry.value().unsafeGetTensorImpl()) != known.end()) continue;
    what = entry.key() + " is new";
    break;
  }
  throw StateError(
      fmt::format("the module's parameters are not those it had when the engine was made: {}. Make a new engine "
                  "after the module has changed",
                  what));
}

void own_storage(torch::Tensor& tensor) {
  const auto bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
  if (tensor.is_contiguous() && tensor.storage_offset() == 0 && tensor.storage().nbytes() == bytes) return;
  const torch::NoGradGuard no_grad;
  tensor.set_data(tensor.detach().clone(torch::MemoryFormat::Contiguous));
}

torch::Tensor convert_parameter(torch::Tensor& parameter, DType precision) {
  const torch::ScalarType type = to_scalar_type(precision);
  if (parameter.scalar_type() == type) return {};
  const torch::NoGradGuard no_grad;
  const torch::Tensor values = parameter.detach().contiguous();
  parameter.set_data(values.to(type));
  return values;
}

void forget_values(torch::Tensor& parameter, DType precision) {
  const torch::NoGradGuard no_grad;
  const HostScope host;
  parameter.set_data(torch::empty(parameter.sizes(), torch::TensorOptions().dtype(to_scalar_type(precision))));
}

void check_value(const std::string& name, const torch::Tensor& parameter, const torch::Tensor& value) {
  require(value.defined() && value.layout() == torch::kStrided && value.is_floating_point(),
          fmt::format("a value for {} must be a dense tensor of a floating type", name));
  require(value.sizes() == parameter.sizes(), fmt::format("{} has shape {}, but the value for it {}", name,
                                                          c10::str(parameter.sizes()), c10::str(value.sizes())));
}

void move_to(const torch::Tensor& parameter, const View& target, torch::Device device, bool keep_values) {
  if (!device.is_cpu()) {
    const torch::NoGradGuard no_grad;
    const auto options = torch::TensorOptions().dtype(parameter.scalar_type()).device(device);
    const torch::Tensor there = parameter.numel() == 0 ? torch::empty(parameter.sizes(), options)
                                                       : torch::from_blob(target.data, parameter.sizes(), options);
    if (keep_values) there.copy_(parameter.detach());
    parameter.set_data(there);
    return;
  }
  if (parameter.numel() == 0 || parameter.const_data_ptr() == target.data) return;
  if (keep_values) std::memcpy(target.data, parameter.const_data_ptr(), parameter.nbytes());
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      {target.data, target.data, [](void*) {}, c10::Device(c10::kCPU)});
}

void move_to_ordinary_memory(const torch::Tensor& parameter) {
  const HostScope host;
  if (!parameter.is_cpu()) {
    const torch::NoGradGuard no_grad;
    parameter.set_data(parameter.detach().to(torch::kCPU));
    return;
  }
  if (parameter.numel() == 0) return;
  c10::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(parameter.nbytes());
  std::memcpy(memory.get(), parameter.const_data_ptr(), parameter.nbytes());
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
}

}  // namespace spillway
