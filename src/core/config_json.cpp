// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "spillway/core/config_file.h"

namespace spillway {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson device_json(const DeviceConfig& device) {
  OrderedJson out;
  out["kind"] = device.kind == DeviceConfig::Kind::cuda ? "cuda" : "emulated";
  out["ordinal"] = device.ordinal;
  out["memory"] = device.memory ? OrderedJson(device.memory->value) : OrderedJson(nullptr);
  out["upload_bandwidth"] = device.upload_bandwidth;
  out["download_bandwidth"] = device.download_bandwidth;
  out["latency_us"] = device.latency.value * 1e6;
  out["compute_rate"] = device.compute_rate;
  return out;
}

OrderedJson optimizer_json(const Config& config) {
  const Hyperparameters& h = config.hyperparameters;
  OrderedJson out;
  out["type"] = to_string(config.optimizer);
  out["lr"] = h.lr;
  out["betas"] = {h.beta1, h.beta2};
  out["eps"] = h.eps;
  out["weight_decay"] = h.weight_decay;
  return out;
}

OrderedJson group_json(const Config& config, const GroupConfig& group) {
  OrderedJson out;
  out["match"] = group.match;
  if (group.max_dims) out["max_dims"] = *group.max_dims;
  if (group.lr) out["lr"] = *group.lr;
  const Hyperparameters all = with_overrides(config.hyperparameters, group);
  if (group.beta1 || group.beta2) out["betas"] = {all.beta1, all.beta2};
  if (group.eps) out["eps"] = *group.eps;
  if (group.weight_decay) out["weight_decay"] = *group.weight_decay;
  return out;
}

OrderedJson lr_schedule_json(const LrScheduleConfig& schedule) {
  using Kind = LrScheduleConfig::Kind;
  OrderedJson out;
  out["type"] = schedule.kind == Kind::cosine ? "cosine" : schedule.kind == Kind::linear ? "linear" : "constant";
  out["warmup_steps"] = schedule.warmup_steps;
  out["warmup_type"] = schedule.warmup == LrScheduleConfig::Warmup::linear ? "linear" : "logarithmic";
  out["warmup_start"] = schedule.warmup_start;
  out["total_steps"] = schedule.total_steps;
  out["final_factor"] = schedule.final_factor;
  return out;
}

OrderedJson loss_scale_json(const LossScaleConfig& scale) {
  OrderedJson out;
  out["initial"] = scale.initial;
  out["growth"] = scale.growth;
  out["growth_interval"] = scale.growth_interval;
  out["backoff"] = scale.backoff;
  out["hysteresis"] = scale.hysteresis;
  out["minimum"] = scale.minimum;
  out["most_skips_at_minimum"] = scale.most_skips_at_minimum;
  return out;
}

OrderedJson document(const Config& config) {
  OrderedJson out;
  out["schedule"] = config.schedule;
  out["precision"] = to_string(config.precision);
  out["device"] = device_json(config.device);
  out["optimizer"] = optimizer_json(config);
  out["groups"] = OrderedJson::array();
  for (const GroupConfig& group : config.groups) out["groups"].push_back(group_json(config, group));
  out["lr_schedule"] = lr_schedule_json(config.lr_schedule);
  out["loss_scale"] = loss_scale_json(config.loss_scale);
  out["low_memory_accumulation"] = config.low_memory_accumulation;
  out["recompute"] = config.recompute;
  out["clip_norm"] = config.clip_norm;
  out["accumulation"] = config.accumulation;
  out["chunk_elements"] = config.chunk_elements;
  out["staging_slots"] = config.staging_slots;
  out["stage"] = config.stage;
  out["transport_sums"] = config.transport_sums;
  out["reduce_last_only"] = config.reduce_last_only;
  out["bucket_chunks"] = config.bucket_chunks;
  out["threads"] = config.threads;
  out["cores"] = config.cores;
  out["instruction_set"] = config.instruction_set;
  out["host_memory"] = config.host_memory ? OrderedJson(config.host_memory->value) : OrderedJson(nullptr);
  return out;
}

std::string origin_of(const std::string& key, const ConfigOrigins& origins) {
  const auto found = origins.find(key);
  std::string text = found == origins.end() ? "default" : found->second;
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';  // a comment is one line
  }
  return text;
}

// The members of an object, one a line, with a comment each; objects inside are written the same way.
std::string members(const OrderedJson& object, const std::string& indent, const std::string& path,
                    const ConfigOrigins& origins) {
  constexpr std::size_t kColumn = 44;  // where comments begin
  std::string text;
  std::size_t left = object.size();
  for (const auto& [key, value] : object.items()) {
    const char* const comma = --left > 0 ? "," : "";
    const std::string name = fmt::format("{}\"{}\": ", indent, key);
    if (value.is_object()) {
      text += fmt::format("{}{{\n{}{}}}{}\n", name, members(value, indent + "  ", path + key + ".", origins), indent,
                          comma);
    } else {
      text += fmt::format("{:<{}}  // {}\n", name + value.dump() + comma, kColumn, origin_of(path + key, origins));
    }
  }
  return text;
}

}  // namespace

std::string to_json(const Config& config, const ConfigOrigins& origins) {
  return "{\n" + members(document(config), "  ", "", origins) + "}\n";
}

}  // namespace spillway
