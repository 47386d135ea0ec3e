// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "spillway/plan/run_plan.h"
#include "spillway/train/engine.h"
#include "train/parameters.h"

namespace spillway {

/// What follows from a module, the configuration and the options of its engine: the parameters and the plan.
struct EnginePlan : RunPlan {
  std::vector<ModelParameter> trainable, frozen;
  std::vector<Hyperparameters> hyperparameters;  // one a group
};

/// Throws: InvalidArgument for what is not supported, by name.
EnginePlan make_engine_plan(const torch::nn::Module& model, const Config& config, const EngineOptions& options);

/// check_fits, and on the emulated device whether this machine has the memory that stands for it. Throws: OutOfMemory.
void check_machine_fits(const RunPlan& plan, const Config& config);

}  // namespace spillway
