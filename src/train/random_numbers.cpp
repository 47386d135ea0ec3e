// SPDX-License-Identifier: Apache-2.0
#include "train/random_numbers.h"

#include <memory>
#include <mutex>
#include <utility>

#include "spillway/train/device_scope.h"

namespace spillway {

std::vector<std::shared_ptr<CausalLM>> causal_lms_in(torch::nn::Module& module) {
  std::vector<std::shared_ptr<CausalLM>> out;
  if (auto* model = dynamic_cast<CausalLM*>(&module)) out.emplace_back(std::shared_ptr<void>(), model);
  for (const auto& inner : module.modules(/*include_self=*/false)) {
    if (auto model = std::dynamic_pointer_cast<CausalLM>(inner)) out.push_back(std::move(model));
  }
  return out;
}

RandomNumbers::RandomNumbers(const std::vector<std::shared_ptr<CausalLM>>& models, torch::Device device) {
  const HostScope host;  // a generator's state is no device memory
  std::vector<torch::Device> devices{torch::kCPU};
  if (!device.is_cpu()) devices.push_back(device);
  for (const torch::Device& one : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(one);
    const std::scoped_lock lock(generator.mutex());
    states_.push_back({generator, generator.get_state()});
  }
  for (const auto& model : models) {
    if (model->uses_dropout()) dropout_.push_back({model, model->dropout_state()});
  }
}

void RandomNumbers::set() const {
  for (const State& state : states_) {
    at::Generator generator = state.generator;
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(state.state);
  }
  for (const Dropout& dropout : dropout_) dropout.model->set_dropout_state(dropout.state);
}

}  // namespace spillway
