// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>

#include "models/evaluation_mode.h"
#include "spillway/core/error.h"
#include "spillway/plan/run_plan.h"

namespace spillway {
namespace {

nlohmann::ordered_json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

// Where a file's first lines end. They are kept by cutting off the rest, never written again: a full disk must not take
// the log of hours with it.
std::uintmax_t bytes_of_lines(const std::filesystem::path& file, std::int64_t lines) {
  std::ifstream stream(file, std::ios::binary);
  std::uintmax_t bytes = 0;
  for (std::string line; lines > 0 && std::getline(stream, line) && !stream.eof(); --lines) bytes += line.size() + 1;
  return bytes;
}

// Every row once; the last batch may be smaller than the others.
Batch rows_from(const TokenFile& file, std::int64_t vocabulary, std::int64_t first, std::int64_t batch_size) {
  DataLoader loader(file, vocabulary, {std::min(batch_size, file.rows() - first), false, 0});
  loader.seek(first);
  return loader.next();
}

}  // namespace

MetricsLog::MetricsLog(const std::filesystem::path& file, std::int64_t keep_lines) : file_(file) {
  if (file.empty()) return;
  if (file.has_parent_path()) {
    std::error_code ignored;  // opening the file reports what is wrong
    std::filesystem::create_directories(file.parent_path(), ignored);
  }
  stream_.open(file, std::ios::app);
  std::error_code error;
  if (stream_ && std::filesystem::is_regular_file(file))
    std::filesystem::resize_file(file, bytes_of_lines(file, keep_lines), error);
  if (!stream_ || error) throw FileError(fmt::format("cannot write the log {}", file.string()));
}

void MetricsLog::write(const StepRecord& record) {
  if (!stream_.is_open()) return;
  nlohmann::ordered_json line;
  line["step"] = record.result.step;
  line["loss"] = number(record.loss);
  line["grad_norm"] = number(record.result.grad_norm);
  line["lr"] = record.result.lr;
  line["status"] = std::string(to_string(record.result.status));
  line["skipped"] = record.result.skipped;
  line["loss_scale"] = record.result.loss_scale;
  line["tokens_per_second"] = number(record.tokens_per_second);
  line["device_peak_bytes"] = record.result.device_peak.value;
  line["host_peak_bytes"] = record.result.host_peak.value;
  stream_ << line.dump() << '\n' << std::flush;
  if (!stream_) throw FileError(fmt::format("cannot write the log {}: is the disk full?", file_.string()));
}

namespace {

// The sum of losses and the number of targets of a rank's rows.
std::pair<double, std::int64_t> sum_losses(CausalLM& model, const TokenFile& file, std::int64_t batch_size,
                                           std::int64_t most_batches, int rank, int ranks) {
  const torch::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const torch::Device device = model.parameters().front().device();
  double sum = 0;
  std::int64_t valid = 0, batches = 0;
  for (std::int64_t row = 0; row < file.rows() && (most_batches == 0 || batches < most_batches);
       row += batch_size, ++batches) {
    const Batch batch = rows_of_rank(rows_from(file, model.config().vocabulary, row, batch_size), rank, ranks);
    if (batch.valid_targets == 0) continue;
    sum += next_token_loss_sum(model.forward(batch.inputs.to(device), batch.documents), batch.targets.to(device))
               .item<double>();
    valid += batch.valid_targets;
  }
  return {sum, valid};
}

}  // namespace

double evaluate(CausalLM& model, const TokenFile& file, std::int64_t batch_size, std::int64_t most_batches) {
  const auto [sum, valid] = sum_losses(model, file, batch_size, most_batches, 0, 1);
  return valid > 0 ? sum / static_cast<double>(valid) : std::nan("");
}

double evaluate(CausalLM& model, const TokenFile& file, std::int64_t batch_size, std::int64_t most_batches,
                Engine& engine) {
  const auto [sum, valid] = sum_losses(model, file, batch_size, most_batches, engine.rank(), engine.rank_count());
  const auto weight = static_cast<double>(valid);
  const double mean = engine.mean_over_ranks(valid > 0 ? sum / weight : 0, weight);
  return engine.all_ranks(valid == 0) ? std::nan("") : mean;
}

std::string describe(const EngineSummary& summary) {
  const bool whole = summary.plan[Tier::device][MemoryUse::activations].value > 0;
  std::string out =
      fmt::format("memory promised by the plan{}:\n{}", whole ? "" : ", activations left out", describe(summary.plan));
  const std::string capacity = summary.device_capacity.value < 0 ? "no limit" : to_string(summary.device_capacity);
  out +=
      fmt::format("memory measured:\n  device   {:>9}  of {}: {}\n  host     {:>9}\n", to_string(summary.device_peak),
                  capacity, to_string(summary.device_at_peak), to_string(summary.host_peak));
  if (summary.low_memory_accumulation) out += "gradients were summed in the working type (low-memory accumulation)\n";
  out += "time by lane:\n";
  for (const TrackTotal& lane : summary.lanes) {
    out += fmt::format("  {:<8} {:>8.2f} s in {} ops", lane.name, lane.busy_seconds, lane.count);
    out += lane.bytes > 0 ? fmt::format(", {}\n", to_string(Bytes{lane.bytes})) : "\n";
  }
  return out;
}

}  // namespace spillway
