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
  bool documents = false;  // whether the forward is given documents
};

/// The most that LibTorch will hold on the device beside the states while it trains on such micro-batches, found by a
/// forward and backward over tensors without memory (torch::kMeta): takes milliseconds, no weights and no memory,
/// whatever the model's size. `model` must have been made on torch::kMeta (meta_causal_lm), parameters that are not
/// trained marked so. On the emulated device this is the figure that will be measured; on a GPU an estimate, since its
/// kernels take workspaces of their own.
Bytes profile_activations(CausalLM& model, const Config& config, BatchShape batch);
/// The same of a forward without gradients: evaluation.
Bytes profile_evaluation(CausalLM& model, BatchShape batch);
/// The same of `generate` with a prompt of `prompt` tokens and `new_tokens` after it, the cache included.
Bytes profile_generation(CausalLM& model, std::int64_t prompt, std::int64_t new_tokens);

}  // namespace spillway
