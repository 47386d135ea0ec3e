// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/models/causal_lm.h"
#include "spillway/train/engine.h"

namespace spillway::test {

/// Everything that a run leaves behind, by parameter name.
struct FinalState {
  std::map<std::string, torch::Tensor> weights, masters, first_moments, second_moments;
  std::map<std::string, std::int64_t> updates;
  std::vector<double> losses, norms;
  std::vector<StepStatus> statuses;
};

/// A small Llama of a few tens of thousands of parameters, the same for the same seed.
std::shared_ptr<CausalLM> tiny_llama(bool tied, std::uint64_t seed = 5);

/// The names of trained parameters of a model.
std::vector<std::string> trained_names(const torch::nn::Module& model);

struct RunOptions {
  std::int64_t steps = 20;
  std::int64_t micro_batches = 1;
  /// Weight of micro-batch m of step s; default: its number of targets.
  std::function<double(std::int64_t step, std::int64_t micro_batch, std::int64_t targets)> weight = {};
  EngineOptions engine = {};  // with a communicator each rank has rows of its own
};

/// Trains on token rows that depend on nothing but step and micro-batch, and reads everything back.
FinalState train(const std::shared_ptr<CausalLM>& model, const Config& config, const RunOptions& options);

/// Fails the present test for every tensor that differs in a bit.
void expect_same_bits(const FinalState& expected, const FinalState& actual);

/// Configuration of a run on the emulated device, AdamW with decay on matrices only.
Config tiny_config(const std::string& schedule, double clip_norm, std::int64_t chunk_elements, int threads);

}  // namespace spillway::test
