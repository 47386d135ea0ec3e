// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/dtype.h"
#include "spillway/core/units.h"

namespace spillway {

enum class OptimizerKind { adamw, adam };
std::string_view to_string(OptimizerKind kind);

/// The numbers of one optimizer step that users set. Names and meanings as in PyTorch.
struct Hyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool operator==(const Hyperparameters&) const = default;
};

/// Throws: InvalidArgument naming `where` for numbers that no step could use.
void check_hyperparameters(const std::string& where, const Hyperparameters& hyperparameters);

/// Parameters with hyperparameters of their own. A parameter belongs to the first group that it matches; those that
/// match none have the optimizer's own values.
struct GroupConfig {
  std::string match = "*";  // parameter names; * stands for any run of characters, ? for one
  std::optional<std::int64_t> max_dims = std::nullopt;  // only parameters of at most this many dimensions
  std::optional<double> lr = std::nullopt, beta1 = std::nullopt, beta2 = std::nullopt, eps = std::nullopt,
                        weight_decay = std::nullopt;
};

/// The optimizer's own numbers with a group's on top.
Hyperparameters with_overrides(Hyperparameters hyperparameters, const GroupConfig& group);

/// The learning rate of update number u (from 0): the optimizer's rate times a factor. During warm-up the factor rises
/// from `warmup_start` to one: by the share (u + 1) / warmup_steps of the way, or log(u + 1) / log(warmup_steps). Then
/// it is constant, or falls to `final_factor` at total_steps on a line or half a cosine.
struct LrScheduleConfig {
  enum class Kind { constant, linear, cosine };
  enum class Warmup { linear, logarithmic };
  Kind kind = Kind::constant;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;  // linear and cosine only
  double final_factor = 0;
  Warmup warmup = Warmup::linear;
  double warmup_start = 0;
};

/// How the loss scale of fp16 training moves. Names and defaults as PyTorch's GradScaler, with a minimum and
/// hysteresis.
struct LossScaleConfig {
  double initial = 65536;
  double growth = 2;  // factor after `growth_interval` finite steps in a row
  std::int64_t growth_interval = 2000;
  double backoff = 0.5;                     // factor after a step that was not finite
  std::int64_t hysteresis = 1;              // steps that are not finite before the first backoff since the last growth
  double minimum = 1;                       // never below
  std::int64_t most_skips_at_minimum = 20;  // in a row; then step() throws, naming the parameters at fault
};

/// The device, and for the emulated one what it imitates.
struct DeviceConfig {
  enum class Kind { emulated, cuda };
  Kind kind = Kind::emulated;
  int ordinal = 0;
  std::optional<Bytes> memory;    // capacity; none: all there is
  double upload_bandwidth = 0;    // bytes a second, host to device; 0: as fast as memory
  double download_bandwidth = 0;  // device to host
  Seconds latency;                // of each copy
  double compute_rate = 0;        // operations a second; 0: as fast as the processor
};

/// Everything an engine is told. Every field has a default that works.
struct Config {
  std::string schedule = "zero_offload";
  DeviceConfig device;
  DType precision = DType::f32;

  OptimizerKind optimizer = OptimizerKind::adamw;
  Hyperparameters hyperparameters;
  std::vector<GroupConfig> groups;
  LrScheduleConfig lr_schedule;

  LossScaleConfig loss_scale;  // fp16 only

  /// Gradients of a step's micro-batches are summed in the working type instead of fp32: two bytes an element less in
  /// bf16 and fp16, and sums that lose small gradients. Without effect in fp32.
  bool low_memory_accumulation = false;
  /// Every block that is called through the engine computes its activations again in backward instead of keeping them.
  bool recompute = false;

  double clip_norm = 0;           // limit of the global gradient norm; 0: none
  std::int64_t accumulation = 0;  // micro-batches a step, where backward() is not told which is the last; 0: unknown

  std::int64_t chunk_elements = 0;  // rounded up to grains of 1024; 0: chosen from the model's size
  std::int64_t staging_slots = 3;   // chunks in flight each way
  /// How ranks share states: 0 each has all, 1 masters and optimizer states are cut, 2 accumulated gradients too.
  /// Without effect on numbers, and on a run of one rank.
  int stage = 2;
  /// Ranks' gradients are summed by the transport (NCCL, MPI), in its order and in the working type, instead of in rank
  /// order in fp32: other bits, which may differ from run to run, and the same bytes on the wire.
  bool transport_sums = false;
  /// Each rank accumulates a step's gradients by itself, and ranks add these sums in the last micro-batch: fewer bytes
  /// between them, each keeps accumulated gradients of all parameters, and other bits. Not at stage 2.
  bool reduce_last_only = false;
  std::int64_t bucket_chunks = 1;    // chunks of one call between ranks, at most staging_slots
  int threads = 0;                   // of the CPU optimizer; 0: half the cores this rank may use
  std::string cores = {};            // that its threads stay on, "0-3,8"; empty: chosen; "any": they run anywhere
  std::string instruction_set = {};  // of its kernels: baseline, avx2, avx512; empty: the fastest
  std::optional<Bytes> host_memory;  // the most that pinned memory of a host's ranks may take; none: no limit

  /// The type in which a step's gradients are summed.
  DType gradient_type() const { return low_memory_accumulation ? precision : DType::f32; }

  /// The hyperparameters of group 0 (the optimizer's own) and of each entry of `groups`.
  std::vector<Hyperparameters> group_hyperparameters() const;

  /// Reads Spillway's own JSON or a DeepSpeed configuration (docs/configuration.md has every key); what the latter says
  /// without effect here is logged as a warning. Unknown keys, wrong types and impossible values are refused.
  /// config_file.h has the same with more said. Throws: InvalidArgument naming the key, and the nearest known one.
  static Config parse(const std::string& json, const std::string& source);
  /// Throws: FileError when the file cannot be read; else as parse.
  static Config load(const std::filesystem::path& file);
  /// Checks values that no run could use. Throws: InvalidArgument naming the field.
  void validate() const;
};

}  // namespace spillway
