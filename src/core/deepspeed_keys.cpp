// SPDX-License-Identifier: Apache-2.0
#include "core/deepspeed_keys.h"

#include <algorithm>
#include <array>

namespace spillway {
namespace {

constexpr auto kRead = DeepSpeedKey::read;
constexpr auto kNone = DeepSpeedKey::without_effect;
constexpr auto kOff = DeepSpeedKey::refused_if_on;
constexpr auto kSwitched = DeepSpeedKey::refused_if_enabled;

constexpr const char* kTakeOut = "take it out";
constexpr const char* kOneProcess = "one process trains on one device: take it out";
constexpr const char* kFp32States = "masters, gradient sums and optimizer states are fp32: take it out";
constexpr const char* kOnlyCpu = R"(use "offload_optimizer": {"device": "cpu"})";

constexpr std::array kTop = std::to_array<DeepSpeedKeyRule>({
    {"", "train_batch_size", kRead, ""},
    {"", "train_micro_batch_size_per_gpu", kRead, ""},
    {"", "gradient_accumulation_steps", kRead, ""},
    {"", "optimizer", kRead, ""},
    {"", "scheduler", kRead, ""},
    {"", "zero_optimization", kRead, ""},
    {"", "fp16", kRead, ""},
    {"", "bf16", kRead, ""},
    {"", "bfloat16", kRead, ""},
    {"", "gradient_clipping", kRead, ""},
    {"", "data_types", kRead, ""},
    {"", "zero_allow_untested_optimizer", kNone, ""},
    {"", "zero_force_ds_cpu_optimizer", kNone, ""},
    {"", "steps_per_print", kNone, ""},
    {"", "wall_clock_breakdown", kNone, ""},
    {"", "memory_breakdown", kNone, ""},
    {"", "dump_state", kNone, ""},
    {"", "communication_data_type", kNone, ""},
    {"", "prescale_gradients", kNone, ""},
    {"", "gradient_predivide_factor", kNone, ""},
    {"", "sparse_gradients", kNone, ""},
    {"", "fp32_allreduce", kNone, ""},
    {"", "disable_allgather", kNone, ""},
    {"", "dataloader_drop_last", kNone, ""},
    {"", "activation_checkpointing", kNone, ""},
    {"", "flops_profiler", kNone, ""},
    {"", "tensorboard", kNone, ""},
    {"", "wandb", kNone, ""},
    {"", "comet", kNone, ""},
    {"", "csv_monitor", kNone, ""},
    {"", "comms_logger", kNone, ""},
    {"", "timers", kNone, ""},
    {"", "aio", kNone, ""},
    {"", "checkpoint", kNone, ""},
    {"", "nebula", kNone, ""},
    {"", "compile", kNone, ""},
    {"", "graph_harvesting", kNone, ""},
    {"", "hybrid_engine", kNone, ""},
    {"", "managed_gradient_accumulation", kNone, ""},
    {"", "gradient_allreduce_op", kNone, ""},
    {"", "seq_parallel_communication_data_type", kNone, ""},
    {"", "disable_python_gc", kNone, ""},
    {"", "vocabulary_size", kNone, ""},
    {"", "use_data_before_expert_parallelism", kNone, ""},
    {"", "log_level", kNone, ""},
    {"", "amp", kSwitched, R"(use "fp16": {"enabled": true} or "bf16": {"enabled": true})"},
    {"", "torch_autocast", kSwitched, R"(use "fp16": {"enabled": true} or "bf16": {"enabled": true})"},
    {"", "autotuning", kSwitched, kTakeOut},
    {"", "elasticity", kSwitched, "give the batch sizes themselves"},
    {"", "eigenvalue", kSwitched, kTakeOut},
    {"", "quantize_training", kSwitched, kTakeOut},
    {"", "compression_training", kOff, kTakeOut},
    {"", "sparse_attention", kOff, kTakeOut},
    {"", "weight_quantization", kOff, kTakeOut},
    {"", "curriculum_learning", kSwitched, kTakeOut},
    {"", "data_efficiency", kSwitched, kTakeOut},
    {"", "progressive_layer_drop", kSwitched, kTakeOut},
    {"", "tensor_parallel", kOff, kOneProcess},
    {"", "sequence_parallel_size", kRead, ""},
    {"", "pipeline", kOff, kOneProcess},
    {"", "expert_parallel", kOff, kOneProcess},
});

constexpr std::array kZero = std::to_array<DeepSpeedKeyRule>({
    {"zero_optimization", "stage", kRead, ""},
    {"zero_optimization", "offload_optimizer", kRead, ""},
    {"zero_optimization", "offload_param", kRead, ""},
    {"zero_optimization", "cpu_offload", kRead, ""},
    {"zero_optimization", "cpu_offload_params", kOff, "parameters stay on the device: take it out"},
    {"zero_optimization", "cpu_offload_param", kOff, "parameters stay on the device: take it out"},
    {"zero_optimization", "cpu_offload_use_pin_memory", kNone, ""},
    {"zero_optimization", "overlap_comm", kNone, ""},
    {"zero_optimization", "contiguous_gradients", kNone, ""},
    {"zero_optimization", "reduce_scatter", kNone, ""},
    {"zero_optimization", "reduce_bucket_size", kNone, ""},
    {"zero_optimization", "use_multi_rank_bucket_allreduce", kNone, ""},
    {"zero_optimization", "allgather_partitions", kNone, ""},
    {"zero_optimization", "allgather_bucket_size", kNone, ""},
    {"zero_optimization", "load_from_fp32_weights", kNone, ""},
    {"zero_optimization", "elastic_checkpoint", kNone, ""},
    {"zero_optimization", "sub_group_size", kNone, ""},
    {"zero_optimization", "prefetch_bucket_size", kNone, ""},
    {"zero_optimization", "param_persistence_threshold", kNone, ""},
    {"zero_optimization", "model_persistence_threshold", kNone, ""},
    {"zero_optimization", "max_live_parameters", kNone, ""},
    {"zero_optimization", "max_reuse_distance", kNone, ""},
    {"zero_optimization", "gather_16bit_weights_on_model_save", kNone, ""},
    {"zero_optimization", "stage3_prefetch_bucket_size", kNone, ""},
    {"zero_optimization", "stage3_param_persistence_threshold", kNone, ""},
    {"zero_optimization", "stage3_model_persistence_threshold", kNone, ""},
    {"zero_optimization", "stage3_max_live_parameters", kNone, ""},
    {"zero_optimization", "stage3_max_reuse_distance", kNone, ""},
    {"zero_optimization", "stage3_gather_16bit_weights_on_model_save", kNone, ""},
    {"zero_optimization", "stage3_gather_fp16_weights_on_model_save", kNone, ""},
    {"zero_optimization", "stage3_use_all_reduce_for_fetch_params", kNone, ""},
    {"zero_optimization", "module_granularity_threshold", kNone, ""},
    {"zero_optimization", "ignore_unused_parameters", kNone, ""},
    {"zero_optimization", "legacy_stage1", kNone, ""},
    {"zero_optimization", "round_robin_gradients", kNone, ""},
    {"zero_optimization", "memory_efficient_linear", kNone, ""},
    {"zero_optimization", "pipeline_loading_checkpoint", kNone, ""},
    {"zero_optimization", "override_module_apply", kNone, ""},
    {"zero_optimization", "log_trace_cache_warnings", kNone, ""},
    {"zero_optimization", "zero_hpz_partition_size", kNone, ""},
    {"zero_optimization", "mics_shard_size", kNone, ""},
    {"zero_optimization", "mics_hierarchical_params_gather", kNone, ""},
    {"zero_optimization", "use_all_reduce_for_fetch_params", kNone, ""},
    {"zero_optimization", "allgather_sequential", kNone, ""},
    {"zero_optimization", "stage3_allgather_sequential", kNone, ""},
    {"zero_optimization", "stage3_module_granularity_threshold", kNone, ""},
    {"zero_optimization", "parameter_alignment", kNone, ""},
    {"zero_optimization", "compute_grad_norm", kNone, ""},
    {"zero_optimization", "enable_sanity_checks", kNone, ""},
    {"zero_optimization", "leaf_module", kNone, ""},
    {"zero_optimization", "zero_quantized_weights", kOff, kTakeOut},
    {"zero_optimization", "zero_quantized_nontrainable_weights", kOff, kTakeOut},
    {"zero_optimization", "zero_quantized_gradients", kOff, kTakeOut},
    {"zero_optimization", "zeropp_loco_param", kOff, kTakeOut},
    {"zero_optimization", "zenflow", kOff, kOnlyCpu},
});

constexpr std::array kOffload = std::to_array<DeepSpeedKeyRule>({
    {"zero_optimization.offload_optimizer", "device", kRead, ""},
    {"zero_optimization.offload_optimizer", "ratio", kRead, ""},
    {"zero_optimization.offload_optimizer", "super_offload", kOff, kOnlyCpu},
    {"zero_optimization.offload_optimizer", "pin_memory", kNone, ""},
    {"zero_optimization.offload_optimizer", "nvme_path", kNone, ""},
    {"zero_optimization.offload_optimizer", "buffer_count", kNone, ""},
    {"zero_optimization.offload_optimizer", "buffer_size", kNone, ""},
    {"zero_optimization.offload_optimizer", "fast_init", kNone, ""},
    {"zero_optimization.offload_optimizer", "pipeline", kNone, ""},
    {"zero_optimization.offload_optimizer", "pipeline_read", kNone, ""},
    {"zero_optimization.offload_optimizer", "pipeline_write", kNone, ""},
    {"zero_optimization.offload_optimizer", "cpuadam_cores_perc", kNone, ""},
    {"zero_optimization.offload_param", "device", kRead, ""},
    {"zero_optimization.offload_param", "pin_memory", kNone, ""},
    {"zero_optimization.offload_param", "nvme_path", kNone, ""},
    {"zero_optimization.offload_param", "buffer_count", kNone, ""},
    {"zero_optimization.offload_param", "buffer_size", kNone, ""},
    {"zero_optimization.offload_param", "max_in_cpu", kNone, ""},
});

constexpr std::array kRest = std::to_array<DeepSpeedKeyRule>({
    {"optimizer", "type", kRead, ""},
    {"optimizer", "params", kRead, ""},
    {"optimizer", "legacy_fusion", kNone, ""},
    {"optimizer.params", "lr", kRead, ""},
    {"optimizer.params", "betas", kRead, ""},
    {"optimizer.params", "eps", kRead, ""},
    {"optimizer.params", "weight_decay", kRead, ""},
    {"optimizer.params", "adam_w_mode", kRead, ""},
    {"optimizer.params", "bias_correction", kRead, ""},
    {"optimizer.params", "torch_adam", kRead, ""},
    {"optimizer.params", "fp32_optimizer_states", kRead, ""},
    {"optimizer.params", "fused", kNone, ""},
    {"optimizer.params", "foreach", kNone, ""},
    {"optimizer.params", "set_grad_none", kNone, ""},
    {"optimizer.params", "amsgrad", kOff, kTakeOut},
    {"optimizer.params", "maximize", kOff, kTakeOut},
    {"optimizer.params", "max_grad_norm", kOff, "use \"gradient_clipping\""},
    {"scheduler", "type", kRead, ""},
    {"scheduler", "params", kRead, ""},
    {"scheduler.params", "warmup_min_lr", kRead, ""},
    {"scheduler.params", "warmup_max_lr", kRead, ""},
    {"scheduler.params", "warmup_num_steps", kRead, ""},
    {"scheduler.params", "warmup_type", kRead, ""},
    {"scheduler.params", "total_num_steps", kRead, ""},
    {"scheduler.params", "warmup_min_ratio", kRead, ""},
    {"scheduler.params", "cos_min_ratio", kRead, ""},
    {"scheduler.params", "last_batch_iteration", kRead, ""},
    {"fp16", "enabled", kRead, ""},
    {"fp16", "loss_scale", kRead, ""},
    {"fp16", "initial_scale_power", kRead, ""},
    {"fp16", "loss_scale_window", kRead, ""},
    {"fp16", "hysteresis", kRead, ""},
    {"fp16", "min_loss_scale", kRead, ""},
    {"fp16", "consecutive_hysteresis", kOff, "\"hysteresis\" counts since the last growth: take it out"},
    {"fp16", "auto_cast", kNone, ""},
    {"fp16", "fp16_master_weights_and_grads", kOff, kFp32States},
    {"bf16", "enabled", kRead, ""},
    {"bf16", "immediate_grad_update", kNone, ""},
    {"bf16", "check_grad_overflow", kNone, ""},
    {"bf16", "bf16_master_weights_and_grads", kOff, kFp32States},
    {"bf16", "bf16_optimizer_states", kOff, kFp32States},
    {"data_types", "grad_accum_dtype", kRead, ""},
    {"data_types", "keep_in_fp32_modules", kOff, kTakeOut},
});

template <class Action>
void for_each_rule(Action action) {
  for (const DeepSpeedKeyRule& rule : kTop) action(rule);
  for (const DeepSpeedKeyRule& rule : kZero) action(rule);
  for (const DeepSpeedKeyRule& rule : kOffload) action(rule);
  for (const DeepSpeedKeyRule& rule : kRest) action(rule);
}

}  // namespace

const DeepSpeedKeyRule* find_deepspeed_key(std::string_view section, std::string_view key) {
  const DeepSpeedKeyRule* found = nullptr;
  for_each_rule([&](const DeepSpeedKeyRule& rule) {
    if (rule.section == section && rule.key == key) found = &rule;
  });
  return found;
}

std::vector<std::string> deepspeed_keys(std::string_view section) {
  std::vector<std::string> keys;
  for_each_rule([&](const DeepSpeedKeyRule& rule) {
    if (rule.section == section) keys.emplace_back(rule.key);
  });
  return keys;
}

bool is_on(const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return !text.empty() && text != "none" && text != "false" && text != "auto";
  }
  if (!value.is_object()) return !value.empty();  // null is empty
  if (value.contains("enabled")) return is_on(value["enabled"]);
  const auto members = value.items();
  return std::any_of(members.begin(), members.end(), [](const auto& member) {
    const bool undivided = member.key().ends_with("_size") && member.value() == 1;
    return !undivided && is_on(member.value());
  });
}

bool is_enabled(const nlohmann::json& value) {
  return is_on(value.is_object() ? value.value("enabled", nlohmann::json(false)) : value);
}

}  // namespace spillway
