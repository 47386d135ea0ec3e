// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "spillway/core/config.h"
#include "spillway/core/units.h"
#include "spillway/models/causal_lm.h"
#include "spillway/state/model_config.h"

namespace spillway {

/// One micro-batch: so many rows of so many tokens each.
struct BatchShape {
  std::int64_t rows = 1;
  std::int64_t tokens = 1;
};

/// The most that LibTorch will hold on the device beside the states while it trains on such micro-batches, found by a
/// forward and backward over tensors without memory (torch::kMeta): takes milliseconds, no weights and no memory,
/// whatever the model's size. `model` must have been made on torch::kMeta (meta_causal_lm), parameters that are not
/// trained marked so. On the emulated device this is the figure that will be measured; on a GPU an estimate, since its
/// kernels take workspaces of their own.
Bytes profile_activations(CausalLM& model, const Config& config, BatchShape batch);
/// The same of a forward without gradients: evaluation and generation.
Bytes profile_evaluation(CausalLM& model, BatchShape batch);

}  // namespace spillway
