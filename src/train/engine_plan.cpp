// SPDX-License-Identifier: Apache-2.0
#include "train/engine_plan.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/runtime/machine.h"
#include "train/checkpoint_tensors.h"

namespace spillway {
namespace {

std::vector<Hyperparameters> all_hyperparameters(const Config& config, const EngineOptions& options) {
  std::vector<Hyperparameters> all = config.group_hyperparameters();
  for (std::size_t i = 0; i < options.groups.size(); ++i) {
    all.push_back(with_overrides(config.hyperparameters, options.groups[i].group));
    check_hyperparameters(fmt::format("EngineOptions::groups[{}]", i), all.back());
  }
  return all;
}

}  // namespace

EnginePlan make_engine_plan(const torch::nn::Module& model, const Config& config, const EngineOptions& options) {
  config.validate();
  EnginePlan plan;
  for (const auto& buffer : model.named_buffers()) {
    if (buffer.value().defined()) static_cast<void>(dtype_of(as_stored(buffer.value()), buffer.key()));
  }
  check_embeddings(model, config.precision, options.communicator == nullptr ? 1 : options.communicator->size());
  plan.hyperparameters = all_hyperparameters(config, options);
  std::vector<PlannedParameter> planned;
  for (ModelParameter& parameter : collect_parameters(model, config, options.groups)) {
    planned.push_back({{parameter.name, parameter.tensor.sizes().vec(), parameter.group}, parameter.trainable});
    (parameter.trainable ? plan.trainable : plan.frozen).push_back(std::move(parameter));
  }
  RankPlace place;
  if (const Communicator* ranks = options.communicator) place = {ranks->size(), ranks->rank(), ranks->local_size()};
  static_cast<RunPlan&>(plan) = plan_run(planned, config, options.activations, place);
  return plan;
}

void check_machine_fits(const RunPlan& plan, const Config& config) {
  check_fits(plan, config);
  // Pools are touched when they are made: without this check the system would end the process instead.
  const std::optional<Bytes> available = available_host_memory();
  const bool emulated = config.device.kind == DeviceConfig::Kind::emulated;
  const Bytes total = (emulated ? plan.memory[Tier::device].total() : Bytes{}) + plan.memory[Tier::pinned].total() +
                      plan.memory[Tier::host].total();
  const Bytes share{available ? available->value / plan.place.local_ranks : 0};
  // Ranks of one host look at the same memory, and may do so before the others have taken theirs.
  if (available && total > share) {
    throw OutOfMemory(fmt::format("{}pinned memory together need{} {}, but this machine has {} left: {} are missing",
                                  emulated ? "the emulated device and " : "", emulated ? "" : "s", to_string(total),
                                  to_string(share), to_string(total - share)),
                      total.value, (total - share).value);
  }
}

}  // namespace spillway
