// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/core/units.h"
#include "spillway/state/model_config.h"

namespace finetune {

/// The command line, as given.
struct Options {
  std::string model, init, data, eval_data, output, offload, log, trace;
  std::string device_memory, link_bandwidth, host_memory, chunk_size, precision, preset, device, prompt;
  std::string lr_schedule;
  std::vector<double> betas;
  std::optional<double> lr, eps, weight_decay, clip_norm;
  std::optional<int> threads;
  std::optional<std::int64_t> grad_accum, warmup_steps;
  std::optional<double> min_lr_ratio;
  std::int64_t batch_size = 8, seq_len = 0, steps = 0;
  std::int64_t eval_every = 0, eval_batches = 32, generate = 0, progress_every = 10;
  double epochs = 0;
  std::uint64_t seed = 0;
  bool no_shuffle = false, recompute = false, low_memory_accumulation = false, dry_run = false;
};

/// What a run holds on the device beside its states, known from the model's shape alone: training, and evaluation and
/// generation where asked for. `length`: tokens of a row.
spillway::Bytes activations_of(const spillway::ModelConfig& shape, const spillway::Config& config,
                               const Options& options, std::int64_t length);

/// Prints the plan of the run and, beside it, what every other schedule would hold. Throws: OutOfMemory, after
/// printing, when the run does not fit.
int print_dry_run(const spillway::ModelConfig& shape, const spillway::Config& config, const Options& options,
                  std::int64_t length);

}  // namespace finetune
