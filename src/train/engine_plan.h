// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/schedule/schedules.h"
#include "spillway/state/chunk_store.h"
#include "spillway/state/layout.h"
#include "train/parameters.h"

namespace spillway {

/// Everything about a run that follows from the module and the configuration alone.
struct EnginePlan {
  std::vector<ModelParameter> trainable, frozen;
  std::unique_ptr<Layout> layout;  // of the trainable ones
  const ScheduleEntry* schedule = nullptr;
  StateSpec spec;
  MemoryPlan memory;
};

/// Throws: InvalidArgument for what is not supported, by name.
EnginePlan make_engine_plan(const torch::nn::Module& model, const Config& config);

/// Throws: OutOfMemory when a tier's capacity is below the plan: which tier, what each use needs, the bytes missing,
/// and a schedule that would fit, if one does.
void check_fits(const EnginePlan& plan, const Config& config);

}  // namespace spillway
