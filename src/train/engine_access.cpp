// SPDX-License-Identifier: Apache-2.0
//
// What programs read and set by name, groups, and update rules of their own.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/core/nearest.h"
#include "train/engine_impl.h"

namespace spillway {
namespace {

void check_group(const std::vector<Hyperparameters>& groups, std::size_t group) {
  require(group < groups.size(),
          fmt::format("there is no parameter group {}: expected 0 to {}", group, groups.size() - 1));
}

torch::Tensor tensor_over(float* data, const torch::Tensor& like, bool on_device) {
  const auto options = torch::TensorOptions().dtype(torch::kFloat).device(on_device ? like.device() : torch::kCPU);
  return torch::from_blob(data, like.sizes(), options);
}

// Calls the program's rule with tensors over the arrays of one parameter.
void call_rule(const OwnUpdate& own, const ModelParameter& parameter, const RuleArrays& arrays) {
  const torch::NoGradGuard no_grad;
  const HostScope host;
  ParameterUpdate update;
  update.name = parameter.name;
  update.master = tensor_over(arrays.master, parameter.tensor, arrays.on_device);
  const bool wide = arrays.gradient_type == DType::f32;
  const auto type = wide ? torch::kFloat : parameter.tensor.scalar_type();
  const auto options = torch::TensorOptions().dtype(type).device(update.master.device());
  const torch::Tensor sum = torch::from_blob(arrays.gradient, parameter.tensor.sizes(), options);
  const auto factor = static_cast<double>(arrays.grad_factor);
  update.gradient = wide ? sum.mul_(factor) : sum.to(torch::kFloat).mul_(factor);
  for (float* state : arrays.states) {
    update.states.push_back(tensor_over(state, parameter.tensor, arrays.on_device));
  }
  update.update = arrays.updates;
  update.hyperparameters = arrays.hyperparameters;
  own.rule(update);
}

bool is_named(const ModelParameter& parameter, const std::string& name) {
  return parameter.name == name ||
         std::find(parameter.aliases.begin(), parameter.aliases.end(), name) != parameter.aliases.end();
}

}  // namespace

void Engine::Impl::set_update_rules() {
  for (const OwnUpdate& own : options.updates) {
    require(own.applies && own.rule, "an entry of EngineOptions::updates lacks its predicate or its rule");
    bool used = false;
    for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
      const ModelParameter& parameter = plan.trainable[i];
      if (!own.applies(parameter.name, parameter.tensor)) continue;
      used = true;
      runtime->set_update_rule(static_cast<std::int64_t>(i),
                               [&own, &parameter](const RuleArrays& arrays) { call_rule(own, parameter, arrays); });
    }
    require(used, "an entry of EngineOptions::updates applies to no trained parameter");
  }
}

void Engine::Impl::check_state_number(std::int64_t k) const {
  require(k >= 0 && k < plan.spec.optimizer_states,
          fmt::format("there is no optimizer state {}: expected 0 to {}", k, plan.spec.optimizer_states - 1));
}

std::int64_t Engine::Impl::find_parameter(const std::string& name) const {
  const auto is = [&](const ModelParameter& parameter) { return is_named(parameter, name); };
  std::vector<std::string> names;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    if (is(plan.trainable[i])) return static_cast<std::int64_t>(i);
    names.push_back(plan.trainable[i].name);
  }
  require(std::none_of(plan.frozen.begin(), plan.frozen.end(), is),
          fmt::format("parameter {} is frozen: it has neither master nor optimizer states", name));
  const std::string nearest = nearest_name(name, names);
  throw InvalidArgument(fmt::format("no trained parameter is named \"{}\"{}", name,
                                    nearest.empty() ? "" : fmt::format("; the nearest name is \"{}\"", nearest)));
}

torch::Tensor Engine::Impl::read(std::int64_t parameter, StateRole role) {
  check_holds_states();
  const TorchDeviceScope device(config.device);
  wait_landed_together();
  const HostScope host;
  const torch::NoGradGuard no_grad;
  torch::Tensor out = torch::empty(plan.trainable[static_cast<std::size_t>(parameter)].tensor.sizes(), torch::kFloat);
  runtime->read(role, parameter, out.mutable_data_ptr<float>());
  return out;
}

void Engine::Impl::write(std::int64_t parameter, StateRole role, const torch::Tensor& value) {
  check_usable();
  const TorchDeviceScope device(config.device);
  const ModelParameter& target = plan.trainable[static_cast<std::size_t>(parameter)];
  check_value(target.name, target.tensor, value);
  // What is set here mends what was written too early.
  if (role.kind == StateRole::Kind::master) on_its_way[static_cast<std::size_t>(parameter)] = false;
  wait_landed_together();
  const HostScope host;
  const torch::Tensor wide = value.detach().to(torch::kCPU, torch::kFloat).contiguous();
  runtime->write(role, parameter, wide.const_data_ptr<float>());
}

// ---- groups --------------------------------------------------------------------------------------------------------

void Engine::set_lr(double lr, std::size_t group) {
  check_group(impl_->base_hyperparameters, group);
  Hyperparameters changed = impl_->base_hyperparameters[group];
  changed.lr = lr;
  set_hyperparameters(changed, group);
}

void Engine::set_hyperparameters(const Hyperparameters& hyperparameters, std::size_t group) {
  check_group(impl_->base_hyperparameters, group);
  check_hyperparameters(fmt::format("parameter group {}", group), hyperparameters);
  impl_->base_hyperparameters[group] = hyperparameters;
}

const Hyperparameters& Engine::hyperparameters(std::size_t group) const {
  check_group(impl_->base_hyperparameters, group);
  return impl_->base_hyperparameters[group];
}

std::size_t Engine::group_of(const std::string& name) const {
  return static_cast<std::size_t>(impl_->plan.trainable[static_cast<std::size_t>(impl_->find_parameter(name))].group);
}

// ---- by name -------------------------------------------------------------------------------------------------------

void Engine::wait_parameters() {
  impl_->check_holds_states();
  const TorchDeviceScope device(impl_->config.device);
  impl_->wait_landed();
}

torch::Tensor Engine::weight(const std::string& name) {
  impl_->check_holds_states();
  for (const ModelParameter& parameter : impl_->plan.frozen) {
    if (!is_named(parameter, name)) continue;
    const HostScope host;
    return parameter.tensor.detach().to(torch::kCPU, torch::kFloat, false, /*copy=*/true);
  }
  return master(name);
}

torch::Tensor Engine::master(const std::string& name) {
  return impl_->read(impl_->find_parameter(name), {StateRole::Kind::master});
}

torch::Tensor Engine::optimizer_state(const std::string& name, std::int64_t k) {
  impl_->check_state_number(k);
  return impl_->read(impl_->find_parameter(name), {StateRole::Kind::optimizer_state, k});
}

std::int64_t Engine::updates(const std::string& name) {
  return impl_->runtime->updates(impl_->find_parameter(name));
}

torch::Tensor Engine::gradient(const std::string& name) {
  const std::int64_t parameter = impl_->find_parameter(name);
  if (impl_->weight_sum == 0) return {};
  impl_->runtime->wait_agree_gradients();
  if (!impl_->runtime->has_gradient(parameter)) return {};
  const HostScope host;
  return impl_->read(parameter, {StateRole::Kind::gradient}).mul_(impl_->grad_scale());
}

void Engine::set_weight(const std::string& name, const torch::Tensor& value) {
  impl_->check_usable();
  for (const ModelParameter& parameter : impl_->plan.frozen) {
    if (!is_named(parameter, name)) continue;
    check_value(parameter.name, parameter.tensor, value);
    const torch::NoGradGuard no_grad;
    torch::Tensor(parameter.tensor).copy_(value.detach());
    return;
  }
  const std::int64_t parameter = impl_->find_parameter(name);
  impl_->write(parameter, {StateRole::Kind::master}, value);
  const auto index = static_cast<std::size_t>(parameter);
  impl_->plan.trainable[index].tensor.unsafeGetTensorImpl()->bump_version();
  impl_->versions[index] = impl_->plan.trainable[index].tensor._version();
}

void Engine::set_optimizer_state(const std::string& name, std::int64_t k, const torch::Tensor& value) {
  impl_->check_state_number(k);
  impl_->write(impl_->find_parameter(name), {StateRole::Kind::optimizer_state, k}, value);
}

void Engine::set_updates(const std::string& name, std::int64_t updates) {
  require(updates >= 0, fmt::format("{} updates of {} were asked for; expected zero or more", updates, name));
  impl_->runtime->set_updates(impl_->find_parameter(name), updates);
}

void Engine::set_gradient(const std::string& name, const torch::Tensor& value) {
  const std::int64_t parameter = impl_->find_parameter(name);
  if (impl_->weight_sum == 0) {
    throw StateError("set_gradient(\"" + name +
                     "\") needs a backward() with a weight above zero before it in this step");
  }
  const ModelParameter& target = impl_->plan.trainable[static_cast<std::size_t>(parameter)];
  check_value(target.name, target.tensor, value);
  const HostScope host;
  const torch::Tensor stored = value.detach().to(torch::kCPU, torch::kFloat).div(impl_->grad_scale());
  impl_->write(parameter, {StateRole::Kind::gradient}, stored);
}

}  // namespace spillway
