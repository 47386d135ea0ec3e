// SPDX-License-Identifier: Apache-2.0
// The configuration of a run: the file, if any, with what the command line says on top.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>

#include "finetune.h"
#include "spillway/core/error.h"
#include "spillway/core/log.h"
#include "spillway/formats/token_file.h"

namespace finetune {
namespace {

using Kind = spillway::LrScheduleConfig::Kind;

/// Puts values of flags over those of the file, and notes that they did.
class Overlay {
 public:
  explicit Overlay(spillway::LoadedConfig& loaded) : loaded_(loaded) {}

  template <class T>
  void set(T& target, const std::optional<T>& value, const char* key, const char* flag) {
    if (!value) return;
    target = *value;
    note(key, flag);
  }
  void note(const char* key, const char* flag) { loaded_.origins[key] = flag; }

 private:
  spillway::LoadedConfig& loaded_;
};

void apply_device(const Options& o, spillway::DeviceConfig& device, Overlay& overlay) {
  if (!o.device_memory.empty()) {
    device.memory = spillway::parse_bytes(o.device_memory);
    overlay.note("device.memory", "--device-memory");
  }
  if (!o.link_bandwidth.empty()) {
    device.upload_bandwidth = device.download_bandwidth = spillway::parse_bandwidth(o.link_bandwidth);
    overlay.note("device.upload_bandwidth", "--link-bandwidth");
    overlay.note("device.download_bandwidth", "--link-bandwidth");
  }
  if (o.device.empty()) return;
  overlay.note("device.kind", "--device");
  if (o.device == "emulated") {
    device.kind = spillway::DeviceConfig::Kind::emulated;
    return;
  }
  int ordinal = 0, used = 0;
  const bool numbered = std::sscanf(o.device.c_str(), "cuda:%d%n", &ordinal, &used) == 1 &&
                        used == static_cast<int>(o.device.size()) && ordinal >= 0;
  spillway::require(o.device == "cuda" || numbered, "--device " + o.device + ": expected emulated, cuda or cuda:N");
  device.kind = spillway::DeviceConfig::Kind::cuda;
  device.ordinal = ordinal;
  overlay.note("device.ordinal", "--device");
}

void apply_optimizer(const Options& o, spillway::Config& config, Overlay& overlay) {
  spillway::Hyperparameters& h = config.hyperparameters;
  overlay.set(h.lr, o.lr, "optimizer.lr", "--lr");
  overlay.set(h.eps, o.eps, "optimizer.eps", "--eps");
  overlay.set(h.weight_decay, o.weight_decay, "optimizer.weight_decay", "--weight-decay");
  if (o.betas.size() == 2) {
    h.beta1 = o.betas[0];
    h.beta2 = o.betas[1];
    overlay.note("optimizer.betas", "--betas");
  }
  overlay.set(config.clip_norm, o.clip_norm, "clip_norm", "--clip-norm");
  if (config.groups.empty()) {
    spillway::GroupConfig no_decay;  // biases and norms
    no_decay.max_dims = 1;
    no_decay.weight_decay = 0;
    config.groups.push_back(no_decay);
    overlay.note("groups", "finetune: no weight decay of biases and norms");
  }
}

std::int64_t total_steps(const Options& o, std::int64_t rows, std::int64_t micro_batches) {
  if (o.steps > 0) return o.steps;
  const double epochs = o.epochs > 0 ? o.epochs : 1;
  const auto rows_a_step = static_cast<double>(o.batch_size * micro_batches);
  return std::max<std::int64_t>(1, std::llround(std::ceil(static_cast<double>(rows) * epochs / rows_a_step)));
}

void apply_lr_schedule(const Options& o, std::int64_t steps, spillway::LrScheduleConfig& schedule, Overlay& overlay) {
  if (!o.lr_schedule.empty()) {
    schedule.kind = o.lr_schedule == "linear"   ? Kind::linear
                    : o.lr_schedule == "cosine" ? Kind::cosine
                                                : Kind::constant;
    overlay.note("lr_schedule.type", "--lr-schedule");
  }
  // The file's own end stays where the file's own schedule does; "auto" there left it to the run.
  if (!o.lr_schedule.empty() || (schedule.kind != Kind::constant && schedule.total_steps == 0)) {
    schedule.total_steps = steps;
    overlay.note("lr_schedule.total_steps", o.steps > 0 ? "--steps" : "rows of --data and --epochs");
  }
  overlay.set(schedule.warmup_steps, o.warmup_steps, "lr_schedule.warmup_steps", "--warmup-steps");
  overlay.set(schedule.final_factor, o.min_lr_ratio, "lr_schedule.final_factor", "--min-lr-ratio");
}

void apply_memory(const Options& o, spillway::Config& config, Overlay& overlay) {
  if (!o.host_memory.empty()) {
    config.host_memory = spillway::parse_bytes(o.host_memory);
    overlay.note("host_memory", "--host-memory");
  }
  if (!o.chunk_size.empty()) {
    config.chunk_elements = spillway::parse_bytes(o.chunk_size).value;
    overlay.note("chunk_elements", "--chunk-size");
  }
  if (o.recompute) {
    config.recompute = true;
    overlay.note("recompute", "--recompute");
  }
  if (o.low_memory_accumulation) {
    config.low_memory_accumulation = true;
    overlay.note("low_memory_accumulation", "--low-memory-accumulation");
  }
  overlay.set(config.threads, o.threads, "threads", "--threads");
  if (!o.cores.empty()) {
    config.cores = o.cores;
    overlay.note("cores", "--cores");
  }
  if (!o.instruction_set.empty()) {
    config.instruction_set = o.instruction_set;
    overlay.note("instruction_set", "--instruction-set");
  }
  overlay.set(config.stage, o.stage, "stage", "--stage");
  if (o.transport_sums) {
    config.transport_sums = true;
    overlay.note("transport_sums", "--transport-sums");
  }
  if (o.reduce_last_only) {
    config.reduce_last_only = true;
    overlay.note("reduce_last_only", "--reduce-last-only");
  }
  overlay.set(config.bucket_chunks, o.bucket_chunks, "bucket_chunks", "--bucket-chunks");
}

// The file may have left the working type to --precision, but not the type of sums in it.
void require_sum_type(const spillway::LoadedConfig& loaded) {
  if (!loaded.sum_type || *loaded.sum_type == spillway::DType::f32 || *loaded.sum_type == loaded.config.precision)
    return;
  throw spillway::InvalidArgument(loaded.origins.at("low_memory_accumulation") + ": " +
                                  std::string(to_string(*loaded.sum_type)) + " is neither fp32 nor the working type " +
                                  std::string(to_string(loaded.config.precision)) + "; give --precision the same");
}

}  // namespace

void read_offload_file(const CLI::App& app, Options& o) {
  const bool given = app.count("--batch-size") > 0;
  o.batch_size_origin = given ? "--batch-size" : "default";
  if (o.offload.empty()) return;
  o.file = spillway::load_config(o.offload, o.rank_count());
  for (const std::string& warning : o.file.warnings) spillway::log({}, spillway::LogLevel::warning, warning);
  if (given && o.file.micro_batch && *o.file.micro_batch != o.batch_size) {
    spillway::log({}, spillway::LogLevel::warning,
                  "--batch-size " + std::to_string(o.batch_size) + " replaces the " +
                      std::to_string(*o.file.micro_batch) + " rows of " + o.file.origins.at("micro_batch") +
                      "; the file's gradient accumulation stays, unless --grad-accum replaces it");
  }
  if (given || !o.file.micro_batch) return;
  o.batch_size = *o.file.micro_batch;
  o.batch_size_origin = o.file.origins.at("micro_batch");
}

spillway::LoadedConfig make_config(const Options& o, std::int64_t rows, std::int64_t& steps) {
  spillway::LoadedConfig loaded = o.file;
  spillway::Config& config = loaded.config;
  Overlay overlay(loaded);
  if (!o.preset.empty()) {
    config.schedule = o.preset;
    overlay.note("schedule", "--preset");
  }
  if (!o.precision.empty()) {
    config.precision = *spillway::parse_dtype(o.precision);
    overlay.note("precision", "--precision");
  }
  require_sum_type(loaded);
  apply_device(o, config.device, overlay);
  apply_optimizer(o, config, overlay);
  apply_memory(o, config, overlay);
  config.accumulation = std::max<std::int64_t>(config.accumulation, 1);
  overlay.set(config.accumulation, o.grad_accum, "accumulation", "--grad-accum");
  steps = total_steps(o, rows, config.accumulation);
  apply_lr_schedule(o, steps, config.lr_schedule, overlay);
  config.validate();
  return loaded;
}

int print_config(const Options& o) {
  std::int64_t rows = 0, steps = 0;
  if (!o.data.empty()) rows = spillway::TokenFile(o.data, o.seq_len).rows();
  // Where nothing says how many steps there are, any warm-up fits, and an end that would be wrong is refused below.
  const spillway::LoadedConfig loaded = make_config(o, rows > 0 ? rows : std::int64_t{1} << 40, steps);
  spillway::require(rows > 0 || o.steps > 0 || !loaded.origins.contains("lr_schedule.total_steps") ||
                        loaded.origins.at("lr_schedule.total_steps") != "rows of --data and --epochs",
                    "--print-config needs --steps or --data where the learning rate falls until the end");
  std::printf("// rows of a micro-batch: %lld  (%s)\n%s", static_cast<long long>(o.batch_size),
              o.batch_size_origin.c_str(), spillway::to_json(loaded.config, loaded.origins).c_str());
  return 0;
}

}  // namespace finetune
