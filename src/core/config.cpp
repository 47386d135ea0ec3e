// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/config_reader.h"
#include "core/strict_json.h"
#include "spillway/core/config_file.h"
#include "spillway/core/error.h"
#include "spillway/core/log.h"
#include "spillway/core/nearest.h"

namespace spillway {
namespace {

using nlohmann::json;

/// Reads one JSON object key by key; finish() refuses what was not asked for.
class Section {
 public:
  Section(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    require(object.is_object(), fmt::format("{}: expected an object, found {}", where_, object.type_name()));
  }

  const json* find(const char* key) {
    known_.emplace_back(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  std::string path(const char* key) const { return fmt::format("{}: {}", where_, key); }

  void read(const char* key, double& target) {
    if (const json* value = find(key)) target = number(key, *value);
  }
  void read(const char* key, std::optional<double>& target) {
    if (const json* value = find(key)) target = number(key, *value);
  }
  void read(const char* key, std::int64_t& target) {
    if (const json* value = find(key)) target = integer(key, *value);
  }
  void read(const char* key, std::optional<std::int64_t>& target) {
    if (const json* value = find(key)) target = integer(key, *value);
  }
  void read(const char* key, bool& target) {
    const json* value = find(key);
    if (value == nullptr) return;
    require(value->is_boolean(), fmt::format("{}: expected true or false, found {}", path(key), shown(*value)));
    target = value->get<bool>();
  }
  void read(const char* key, std::string& target) {
    if (const json* value = find(key)) target = text(key, *value);
  }
  void read(const char* key, std::optional<Bytes>& target) {
    const json* value = find(key);
    if (value == nullptr || value->is_null()) return;
    target = value->is_string() ? parsed(key, *value, parse_bytes) : Bytes{integer(key, *value)};
  }
  void read_bandwidth(const char* key, double& target) {
    const json* value = find(key);
    if (value == nullptr) return;
    target = value->is_string() ? parsed(key, *value, parse_bandwidth) : number(key, *value);
  }
  std::string text(const char* key, const json& value) const {
    require(value.is_string(), fmt::format("{}: expected a string, found {}", path(key), shown(value)));
    return value.get<std::string>();
  }

  void finish() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      const std::string nearest = likely_name(key, known_);
      throw InvalidArgument(fmt::format("{}: unknown key {}{}", where_, in_quotes(key),
                                        nearest.empty() ? "" : fmt::format("; did you mean \"{}\"?", nearest)));
    }
  }

 private:
  template <class T>
  T parsed(const char* key, const json& value, T (*parse)(std::string_view)) const {
    try {
      return parse(value.get<std::string>());
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("{}: {}", path(key), error.what()));
    }
  }
  double number(const char* key, const json& value) const {
    require(value.is_number(), fmt::format("{}: expected a number, found {}", path(key), shown(value)));
    return value.get<double>();
  }
  std::int64_t integer(const char* key, const json& value) const {
    require(value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() < (1ULL << 62)),
            fmt::format("{}: expected an integer, found {}", path(key), shown(value)));
    return value.get<std::int64_t>();
  }

  const json& object_;
  const std::string where_;
  std::vector<std::string> known_;
};

// The value whose name the text is, among `choices`. Throws: InvalidArgument listing them.
template <class T>
T choose(const std::string& where, const std::string& text, std::initializer_list<std::pair<const char*, T>> choices) {
  std::string known;
  for (const auto& [name, value] : choices) {
    if (text == name) return value;
    known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", name);
  }
  throw InvalidArgument(fmt::format("{}: {} is not one of {}", where, in_quotes(text), known));
}

void read_device(const json& object, const std::string& source, DeviceConfig& device) {
  Section section(object, source + ": device");
  std::string kind = "emulated";
  section.read("kind", kind);
  device.kind = choose<DeviceConfig::Kind>(
      section.path("kind"), kind, {{"emulated", DeviceConfig::Kind::emulated}, {"cuda", DeviceConfig::Kind::cuda}});
  std::int64_t ordinal = 0;
  section.read("ordinal", ordinal);
  require(ordinal >= 0 && ordinal < 1024, section.path("ordinal") + ": expected 0 to 1023");
  device.ordinal = static_cast<int>(ordinal);
  section.read("memory", device.memory);
  double both = 0;
  section.read_bandwidth("link_bandwidth", both);
  device.upload_bandwidth = device.download_bandwidth = both;
  section.read_bandwidth("upload_bandwidth", device.upload_bandwidth);
  section.read_bandwidth("download_bandwidth", device.download_bandwidth);
  double microseconds = 0;
  section.read("latency_us", microseconds);
  device.latency = {microseconds * 1e-6};
  section.read("compute_rate", device.compute_rate);
  section.finish();
}

void read_betas(Section& section, std::optional<double>& beta1, std::optional<double>& beta2) {
  const json* betas = section.find("betas");
  if (betas == nullptr) return;
  require(betas->is_array() && betas->size() == 2 && (*betas)[0].is_number() && (*betas)[1].is_number(),
          section.path("betas") + ": expected two numbers");
  beta1 = (*betas)[0].get<double>();
  beta2 = (*betas)[1].get<double>();
}

void read_optimizer(const json& object, const std::string& source, Config& config) {
  Section section(object, source + ": optimizer");
  std::string type = "adamw";
  section.read("type", type);
  config.optimizer = choose<OptimizerKind>(section.path("type"), type,
                                           {{"adamw", OptimizerKind::adamw}, {"adam", OptimizerKind::adam}});
  Hyperparameters& h = config.hyperparameters;
  std::optional<double> beta1, beta2;
  read_betas(section, beta1, beta2);
  h.beta1 = beta1.value_or(h.beta1);
  h.beta2 = beta2.value_or(h.beta2);
  section.read("lr", h.lr);
  section.read("eps", h.eps);
  section.read("weight_decay", h.weight_decay);
  section.finish();
}

GroupConfig read_group(const json& object, const std::string& where) {
  Section section(object, where);
  GroupConfig group;
  section.read("match", group.match);
  section.read("max_dims", group.max_dims);
  section.read("lr", group.lr);
  read_betas(section, group.beta1, group.beta2);
  section.read("eps", group.eps);
  section.read("weight_decay", group.weight_decay);
  section.finish();
  return group;
}

void read_lr_schedule(const json& object, const std::string& source, LrScheduleConfig& schedule) {
  Section section(object, source + ": lr_schedule");
  std::string type = "constant";
  section.read("type", type);
  using Kind = LrScheduleConfig::Kind;
  schedule.kind = choose<Kind>(section.path("type"), type,
                               {{"constant", Kind::constant}, {"linear", Kind::linear}, {"cosine", Kind::cosine}});
  section.read("warmup_steps", schedule.warmup_steps);
  section.read("total_steps", schedule.total_steps);
  section.read("final_factor", schedule.final_factor);
  std::string warmup = "linear";
  section.read("warmup_type", warmup);
  using Warmup = LrScheduleConfig::Warmup;
  schedule.warmup = choose<Warmup>(section.path("warmup_type"), warmup,
                                   {{"linear", Warmup::linear}, {"logarithmic", Warmup::logarithmic}});
  section.read("warmup_start", schedule.warmup_start);
  section.finish();
}

void read_loss_scale(const json& object, const std::string& source, LossScaleConfig& scale) {
  Section section(object, source + ": loss_scale");
  section.read("initial", scale.initial);
  section.read("growth", scale.growth);
  section.read("growth_interval", scale.growth_interval);
  section.read("backoff", scale.backoff);
  section.read("hysteresis", scale.hysteresis);
  section.read("minimum", scale.minimum);
  section.read("most_skips_at_minimum", scale.most_skips_at_minimum);
  section.finish();
}

void check_loss_scale(const LossScaleConfig& scale) {
  require(std::isfinite(scale.initial) && scale.minimum > 0 && scale.initial >= scale.minimum,
          "loss_scale: initial and minimum must be above zero, and initial at least minimum");
  require(scale.growth > 1 && std::isfinite(scale.growth), "loss_scale: growth must be above one");
  require(scale.backoff > 0 && scale.backoff < 1, "loss_scale: backoff must be between zero and one");
  require(scale.growth_interval >= 1 && scale.hysteresis >= 1 && scale.most_skips_at_minimum >= 1,
          "loss_scale: growth_interval, hysteresis and most_skips_at_minimum must be at least one");
}

void check_lr_schedule(const LrScheduleConfig& schedule) {
  require(schedule.warmup_steps >= 0, "lr_schedule: warmup_steps is negative");
  require(schedule.final_factor >= 0 && schedule.final_factor <= 1, "lr_schedule: final_factor must be from 0 to 1");
  require(schedule.warmup_start >= 0 && schedule.warmup_start <= 1, "lr_schedule: warmup_start must be from 0 to 1");
  if (schedule.kind == LrScheduleConfig::Kind::constant) return;
  require(schedule.total_steps > 0, "lr_schedule: a linear or cosine schedule needs total_steps above zero");
  require(
      schedule.warmup_steps <= schedule.total_steps,
      fmt::format("lr_schedule: {} warm-up steps do not fit in {} steps", schedule.warmup_steps, schedule.total_steps));
}

}  // namespace

std::string_view to_string(OptimizerKind kind) {
  return kind == OptimizerKind::adam ? "adam" : "adamw";
}

void check_hyperparameters(const std::string& where, const Hyperparameters& h) {
  require(std::isfinite(h.lr) && h.lr >= 0,
          fmt::format("{}: the learning rate is {}; expected zero or more", where, h.lr));
  for (double beta : {h.beta1, h.beta2}) {
    require(beta >= 0 && beta < 1, fmt::format("{}: a beta is {}; expected 0 <= beta < 1", where, beta));
  }
  require(std::isfinite(h.eps) && h.eps >= 0, fmt::format("{}: eps is {}; expected zero or more", where, h.eps));
  require(std::isfinite(h.weight_decay) && h.weight_decay >= 0,
          fmt::format("{}: the weight decay is {}; expected zero or more", where, h.weight_decay));
}

Hyperparameters with_overrides(Hyperparameters h, const GroupConfig& group) {
  h.lr = group.lr.value_or(h.lr);
  h.beta1 = group.beta1.value_or(h.beta1);
  h.beta2 = group.beta2.value_or(h.beta2);
  h.eps = group.eps.value_or(h.eps);
  h.weight_decay = group.weight_decay.value_or(h.weight_decay);
  return h;
}

std::vector<Hyperparameters> Config::group_hyperparameters() const {
  std::vector<Hyperparameters> all{hyperparameters};
  for (const GroupConfig& group : groups) all.push_back(with_overrides(hyperparameters, group));
  return all;
}

Config read_own_config(const json& document, const std::string& source) {
  Config config;
  Section section(document, source);
  section.read("schedule", config.schedule);
  if (const json* value = section.find("precision")) {
    const std::string name = section.text("precision", *value);
    const std::optional<DType> type = parse_dtype(name);
    require(type.has_value(),
            fmt::format("{}: {} is not one of fp32, bf16, fp16", section.path("precision"), in_quotes(name)));
    config.precision = *type;
  }
  if (const json* value = section.find("device")) read_device(*value, source, config.device);
  if (const json* value = section.find("optimizer")) read_optimizer(*value, source, config);
  if (const json* value = section.find("groups")) {
    require(value->is_array(), section.path("groups") + ": expected an array");
    for (const json& group : *value) {
      config.groups.push_back(read_group(group, fmt::format("{}: groups[{}]", source, config.groups.size())));
    }
  }
  if (const json* value = section.find("lr_schedule")) read_lr_schedule(*value, source, config.lr_schedule);
  if (const json* value = section.find("loss_scale")) read_loss_scale(*value, source, config.loss_scale);
  section.read("low_memory_accumulation", config.low_memory_accumulation);
  section.read("recompute", config.recompute);
  section.read("clip_norm", config.clip_norm);
  section.read("accumulation", config.accumulation);
  section.read("chunk_elements", config.chunk_elements);
  section.read("staging_slots", config.staging_slots);
  std::int64_t stage = config.stage;
  section.read("stage", stage);
  require(
      stage >= 0 && stage <= 2,
      fmt::format("{}: {} is not available; expected 0 (every rank has all states), 1 (masters and optimizer states "
                  "are cut) or 2 (gradients too)",
                  section.path("stage"), stage));
  config.stage = static_cast<int>(stage);
  section.read("transport_sums", config.transport_sums);
  section.read("reduce_last_only", config.reduce_last_only);
  section.read("bucket_chunks", config.bucket_chunks);
  std::int64_t threads = 0;
  section.read("threads", threads);
  require(threads >= 0 && threads <= 4096, section.path("threads") + ": expected 0 to 4096");
  config.threads = static_cast<int>(threads);
  section.read("cores", config.cores);
  section.read("instruction_set", config.instruction_set);
  section.read("host_memory", config.host_memory);
  section.finish();
  return config;
}

const std::vector<std::string>& own_top_keys() {
  static const std::vector<std::string> keys = {
      "schedule",        "precision",   "device",        "optimizer",
      "groups",          "lr_schedule", "loss_scale",    "low_memory_accumulation",
      "recompute",       "clip_norm",   "accumulation",  "chunk_elements",
      "staging_slots",   "stage",       "bucket_chunks", "transport_sums",
      "threads",         "host_memory", "cores",         "instruction_set",
      "reduce_last_only"};
  return keys;
}

Config Config::parse(const std::string& text, const std::string& source) {
  const LoadedConfig loaded = parse_config(text, source);
  for (const std::string& warning : loaded.warnings) log({}, LogLevel::warning, warning);
  loaded.config.validate();
  return loaded.config;
}

Config Config::load(const std::filesystem::path& file) {
  return parse(read_config_file(file), file.string());
}

namespace {

void check_device(const DeviceConfig& device) {
  require(!device.memory || device.memory->value > 0,
          fmt::format("device.memory is {} bytes; expected more than zero", device.memory.value_or(Bytes{}).value));
  for (const auto& [key, value] :
       {std::pair{"upload_bandwidth", device.upload_bandwidth},
        std::pair{"download_bandwidth", device.download_bandwidth}, std::pair{"latency_us", device.latency.value * 1e6},
        std::pair{"compute_rate", device.compute_rate}}) {
    require(std::isfinite(value) && value >= 0,
            fmt::format("device.{} is {}; expected a finite number, zero (not modelled) or more", key, value));
  }
}

}  // namespace

void Config::validate() const {
  require(precision == DType::f32 || precision == DType::bf16 || precision == DType::f16,
          fmt::format("precision {} is not one of fp32, bf16, fp16", to_string(precision)));
  check_hyperparameters("optimizer", hyperparameters);
  for (const GroupConfig& group : groups) {
    check_hyperparameters(fmt::format("group {}", in_quotes(group.match)), with_overrides(hyperparameters, group));
    require(!group.max_dims || *group.max_dims >= 0,
            fmt::format("group {}: max_dims is negative", in_quotes(group.match)));
  }
  check_lr_schedule(lr_schedule);
  check_loss_scale(loss_scale);
  require(std::isfinite(clip_norm) && clip_norm >= 0,
          fmt::format("clip_norm is {}; expected zero (off) or more", clip_norm));
  require(accumulation >= 0, "accumulation is negative");
  require(chunk_elements >= 0, "chunk_elements is negative");
  require(staging_slots >= 1 && staging_slots <= 1024,
          fmt::format("staging_slots is {}; expected 1 to 1024", staging_slots));
  require(stage >= 0 && stage <= 2, fmt::format("stage is {}; expected 0, 1 or 2", stage));
  require(bucket_chunks >= 1 && bucket_chunks <= 1024,
          fmt::format("bucket_chunks is {}; expected 1 to 1024", bucket_chunks));
  require(!reduce_last_only || stage < 2,
          "reduce_last_only needs stage 0 or 1, and the stage is 2, where a rank keeps accumulated gradients of its "
          "shards alone");
  require(threads >= 0, "threads is negative");
  constexpr std::array kSets = {"", "baseline", "avx2", "avx512"};  // which of them this machine has, it says itself
  require(std::find(kSets.begin(), kSets.end(), instruction_set) != kSets.end(),
          fmt::format("instruction_set {} is not one of baseline, avx2, avx512", in_quotes(instruction_set)));
  check_device(device);
}

}  // namespace spillway
