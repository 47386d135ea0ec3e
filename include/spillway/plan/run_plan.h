// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/schedule/schedules.h"
#include "spillway/state/chunk_store.h"
#include "spillway/state/layout.h"
#include "spillway/state/lora_options.h"
#include "spillway/state/model_config.h"

namespace spillway {

/// A parameter as planning sees it.
struct PlannedParameter {
  ParameterInfo info;
  bool trainable = true;
};

/// Which of the run's ranks is planned for: how many there are, and how many share its host.
struct RankPlace {
  int ranks = 1;
  int rank = 0;
  int local_ranks = 1;
};

/// Everything about a run that follows from its parameters' shapes and the configuration alone.
struct RunPlan {
  std::unique_ptr<Layout> layout;  // of the trainable parameters, in their order
  const ScheduleEntry* schedule = nullptr;
  StateSpec spec;
  RankPlace place;
  MemoryPlan memory;  // what the pools are made from, and activations where they were given
};

/// `activations`: the most that LibTorch will hold on the device beside the states.
/// Throws: InvalidArgument for an unknown schedule, as Config::validate, as Layout.
RunPlan plan_run(std::span<const PlannedParameter> parameters, const Config& config,
                 std::optional<Bytes> activations = std::nullopt, const RankPlace& place = {});

/// Throws: OutOfMemory when a tier's configured capacity (of the pinned tier this rank's share) is below the plan:
/// which tier, what each use needs, the bytes missing, and a schedule that would fit.
void check_fits(const RunPlan& plan, const Config& config);

/// The parameters of a model that need not exist, in registration order, all trainable; with `lora` those of the model
/// frozen, then the adapters. Throws: as lora_parameter_shapes.
std::vector<PlannedParameter> planned_parameters(const ModelConfig& model, const Config& config,
                                                 const std::optional<LoraOptions>& lora = std::nullopt);

/// The group of Config::groups that a parameter belongs to, from 1; 0: the optimizer's own.
int group_of(const std::string& name, std::int64_t dims, const Config& config);

/// One line a tier: "  device   40.2 MiB  parameters 38.1 MiB, staging 2.12 MiB".
std::string describe(const MemoryPlan& plan);

}  // namespace spillway
