// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "spillway/models/causal_lm.h"
#include "spillway/train/data_loader.h"
#include "spillway/train/engine.h"

namespace spillway {

/// One line of a training log.
struct StepRecord {
  StepResult result;
  double loss = 0;  // mean over the step's valid targets; NaN where it has none
  double tokens_per_second = 0;
};

/// Writes one JSON object a step: step, loss, grad_norm, lr, status, skipped, loss_scale, tokens_per_second,
/// device_peak_bytes, host_peak_bytes. Numbers that are not finite are written as strings ("nan", "inf"), which JSON
/// has no numbers for.
class MetricsLog {
 public:
  /// An empty path: nothing is written. The first `keep_lines` lines of a log that is there already are kept: those of
  /// the steps before a resume. Throws: FileError.
  explicit MetricsLog(const std::filesystem::path& file, std::int64_t keep_lines = 0);
  /// Throws: FileError when the disk is full.
  void write(const StepRecord& record);

 private:
  std::filesystem::path file_;
  std::ofstream stream_;
};

/// The mean loss over the targets of the first `most_batches` micro-batches of `file` in its order (all, when 0: every
/// row once, whatever the batch size), without gradients and in evaluation mode; NaN where these have no target.
double evaluate(CausalLM& model, const TokenFile& file, std::int64_t batch_size, std::int64_t most_batches);
/// The same on all ranks of an engine, each with its rows of every micro-batch.
double evaluate(CausalLM& model, const TokenFile& file, std::int64_t batch_size, std::int64_t most_batches,
                Engine& engine);

/// "device  38.1 MiB parameters, ..." and "h2d  3.21 s busy, 1.2 GiB": bytes by tier and time by lane.
std::string describe(const EngineSummary& summary);

}  // namespace spillway
