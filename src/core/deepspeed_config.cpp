// SPDX-License-Identifier: Apache-2.0
#include "core/deepspeed_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <tuple>

#include "core/deepspeed_part.h"
#include "core/strict_json.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

using nlohmann::json;
using Part = DeepSpeedPart;
constexpr std::int64_t kManySteps = 1'000'000'000'000'000, kManyRows = 1 << 30;

// Whether a key names a section and a key in it. More dots than there are sections are somebody's text.
bool is_path(const std::string& key) {
  constexpr auto kDeepest = 2;
  const auto dots = std::count(key.begin(), key.end(), '.');
  return dots >= 1 && dots <= kDeepest;
}

// "zero_optimization.stage": 1 as "zero_optimization": {"stage": 1}.
json without_dots(const json& object, const std::string& source) {
  json out = json::object();
  for (const auto& [key, value] : object.items()) {
    if (!is_path(key)) out[key] = value;
  }
  for (const auto& [key, value] : object.items()) {
    if (!is_path(key)) continue;
    const std::size_t dot = key.find('.');
    json& section = out[key.substr(0, dot)];
    const std::string rest = key.substr(dot + 1);
    require((section.is_null() || section.is_object()) && !section.contains(rest),
            fmt::format("{}: \"{}\" is given twice", source, key));
    section[rest] = value;
  }
  for (auto& [key, value] : out.items()) {
    if (value.is_object()) value = without_dots(value, source + ": " + key);
  }
  return out;
}

json with_present_names(json document, const std::string& source) {
  const auto older = document.find("bfloat16");
  if (older == document.end()) return document;
  require(!document.contains("bf16"), source + ": \"bf16\" and its older name \"bfloat16\" are both given");
  document["bf16"] = *older;
  document.erase("bfloat16");
  return document;
}

// ---- precision -----------------------------------------------------------------------------------

// What the 16-bit sections and their names say: enabled, not, or not given.
std::optional<bool> enabled(const std::optional<Part>& part) {
  if (!part || part->is_auto("enabled")) return std::nullopt;
  return part->boolean("enabled").value_or(false);
}

void read_static_scale(const Part& fp16, double scale, LossScaleConfig& out) {
  require(std::isfinite(scale) && scale > 0,
          fmt::format("{}: expected 0 (dynamic) or a scale above zero", fp16.where("loss_scale")));
  out.initial = out.minimum = scale;
  out.growth_interval = kManySteps;
  for (const char* key : {"loss_scale.initial", "loss_scale.minimum", "loss_scale.growth_interval"}) {
    fp16.give(key, "loss_scale");
  }
}

void read_loss_scale(const Part& fp16, LossScaleConfig& out) {
  const double fixed = fp16.number("loss_scale").value_or(0);
  if (fixed != 0) return read_static_scale(fp16, fixed, out);
  out.initial = std::ldexp(1.0, static_cast<int>(fp16.integer("initial_scale_power", 0, 126).value_or(16)));
  out.growth_interval = fp16.integer("loss_scale_window", 1, kManySteps).value_or(1000);
  out.hysteresis = fp16.integer("hysteresis", 1, kManySteps).value_or(2);
  out.minimum = fp16.number("min_loss_scale").value_or(1);
  require(out.minimum > 0 && out.minimum <= out.initial,
          fmt::format("{}: {} is not above zero and at most the initial scale {}", fp16.where("min_loss_scale"),
                      out.minimum, out.initial));
  fp16.give("loss_scale.initial", "initial_scale_power");
  fp16.give("loss_scale.growth_interval", "loss_scale_window");
  fp16.give("loss_scale.hysteresis", "hysteresis");
  fp16.give("loss_scale.minimum", "min_loss_scale");
}

void read_sum_type(const Part& top, Config& config) {
  const std::optional<Part> types = top.part("data_types");
  const std::optional<std::string> name = types ? types->text("grad_accum_dtype") : std::nullopt;
  if (!name) return;
  const std::optional<DType> type = parse_dtype(*name);
  const bool left_open = !top.file().loaded.origins.contains("precision");  // "auto": to the program
  const bool fits = type && (*type == DType::f32 || *type == config.precision ||
                             (left_open && (*type == DType::bf16 || *type == DType::f16)));
  require(fits, fmt::format("{}: {} is neither fp32 nor the working type{}", types->where("grad_accum_dtype"),
                            in_quotes(*name), left_open ? "" : fmt::format(" {}", to_string(config.precision))));
  top.file().loaded.sum_type = type;
  config.low_memory_accumulation = *type != DType::f32;
  types->give("low_memory_accumulation", "grad_accum_dtype");
}

void read_precision(const Part& top, Config& config) {
  const std::optional<Part> fp16 = top.switched_part("fp16");
  const std::optional<Part> bf16 = top.switched_part("bf16");
  const std::optional<bool> wants_fp16 = enabled(fp16), wants_bf16 = enabled(bf16);
  require(!wants_fp16.value_or(false) || !wants_bf16.value_or(false),
          fmt::format("{}: fp16 and bf16 are both enabled; enable one", top.file().source));
  if (wants_bf16.value_or(false)) {
    config.precision = DType::bf16;
    bf16->give("precision", "enabled");
  } else if (wants_fp16.value_or(false)) {
    config.precision = DType::f16;
    fp16->give("precision", "enabled");
  }
  if (fp16) read_loss_scale(*fp16, config.loss_scale);
  read_sum_type(top, config);
}

// ---- placement -----------------------------------------------------------------------------------

bool offloads_to_cpu(const Part& zero) {
  const std::optional<Part> optimizer = zero.part("offload_optimizer");
  const bool older = zero.boolean("cpu_offload").value_or(false);
  if (!optimizer) return older;
  const std::string device = optimizer->text("device").value_or("none");
  require(device == "cpu" || device == "none", fmt::format("{}: {} is not available; use \"cpu\" or \"none\"",
                                                           optimizer->where("device"), in_quotes(device)));
  require(device == "cpu" || !older, fmt::format("{}: \"cpu_offload\" and \"offload_optimizer\" say different things",
                                                 zero.where("offload_optimizer")));
  require(optimizer->number("ratio").value_or(1) == 1,
          fmt::format("{}: the optimizer is on the CPU as a whole; use 1 or take it out", optimizer->where("ratio")));
  return device == "cpu";
}

void read_zero(const Part& top, Config& config) {
  config.schedule = "resident";
  config.stage = 0;
  top.give("schedule", "zero_optimization");
  top.give("stage", "zero_optimization");
  const json* value = top.find("zero_optimization");
  if (value == nullptr) return;
  if (value->is_boolean()) {
    config.stage = value->get<bool>() ? 1 : 0;
    return;
  }
  const Part zero = *top.part("zero_optimization");
  const std::int64_t stage = zero.integer("stage", 0, 3).value_or(0);
  require(stage < 3, fmt::format("{}: 3 divides parameters among ranks, which is not available; use 2, with "
                                 "\"offload_optimizer\" to keep optimizer states on the host",
                                 zero.where("stage")));
  config.stage = static_cast<int>(stage);
  zero.give("stage", "stage");
  if (const std::optional<Part> parameters = zero.part("offload_param")) {
    const std::string device = parameters->text("device").value_or("none");
    require(device == "none", fmt::format("{}: {} is not available, parameters stay on the device; use \"none\", with "
                                          "\"offload_optimizer\" to keep optimizer states on the host",
                                          parameters->where("device"), in_quotes(device)));
  }
  if (offloads_to_cpu(zero)) config.schedule = "zero_offload";
  zero.give("schedule", zero.has("offload_optimizer") ? "offload_optimizer" : "cpu_offload");
}

// ---- optimizer -----------------------------------------------------------------------------------

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

void read_betas(const Part& params, Hyperparameters& h) {
  const json* betas = params.find("betas");
  if (betas == nullptr) return;
  if (betas->is_array() && betas->size() == 2 && (*betas)[0] == "auto" && (*betas)[1] == "auto") return;
  const bool two = betas->is_array() && betas->size() == 2 && lenient_number((*betas)[0]).has_value() &&
                   lenient_number((*betas)[1]).has_value();
  require(two, fmt::format("{}: expected two numbers, found {}", params.where("betas"), shown(*betas)));
  h.beta1 = *lenient_number((*betas)[0]);
  h.beta2 = *lenient_number((*betas)[1]);
  params.give("optimizer.betas", "betas");
}

// DeepSpeed's Adams have a weight decay of 0 where none is given; PyTorch's AdamW, which torch_adam asks for, has 0.01.
double default_weight_decay(const Part* params, bool decoupled) {
  const bool torch_adam = params != nullptr && params->boolean("torch_adam").value_or(false);
  return torch_adam && decoupled ? 0.01 : 0.0;
}

void read_optimizer_params(const Part& params, Hyperparameters& h) {
  require(
      params.boolean("bias_correction").value_or(true),
      fmt::format("{}: Adam without bias correction is not available; take it out", params.where("bias_correction")));
  require(params.boolean("fp32_optimizer_states").value_or(true),
          fmt::format("{}: optimizer states are fp32; take it out", params.where("fp32_optimizer_states")));
  read_betas(params, h);
  for (const auto& [key, own_key, target] :
       {std::tuple{"lr", "optimizer.lr", &h.lr}, std::tuple{"eps", "optimizer.eps", &h.eps},
        std::tuple{"weight_decay", "optimizer.weight_decay", &h.weight_decay}}) {
    const std::optional<double> value = params.number(key);
    if (!value) continue;
    *target = *value;
    params.give(own_key, key);
  }
}

void read_optimizer(const Part& top, Config& config) {
  const std::optional<Part> optimizer = top.part("optimizer");
  if (!optimizer) return;
  const std::string type = optimizer->text("type").value_or("none");
  const std::string name = lower(type);
  require(name == "adam" || name == "adamw",
          fmt::format("{}: {} is not available; use \"AdamW\" or \"Adam\"", optimizer->where("type"), in_quotes(type)));
  const std::optional<Part> params = optimizer->part("params");
  const bool decoupled = !params || params->boolean("adam_w_mode").value_or(true);
  require(name == "adam" || decoupled,
          fmt::format("{}: AdamW with adam_w_mode false; use the type \"Adam\"", optimizer->where("params")));
  config.optimizer = decoupled ? OptimizerKind::adamw : OptimizerKind::adam;
  optimizer->give("optimizer.type", "type");
  if (!params || !params->is_auto("weight_decay")) {
    config.hyperparameters.weight_decay = default_weight_decay(params ? &*params : nullptr, decoupled);
    optimizer->give("optimizer.weight_decay", "type");
  }
  if (params) read_optimizer_params(*params, config.hyperparameters);
}

// ---- learning-rate schedule ----------------------------------------------------------------------

void read_warmup(const Part& params, LrScheduleConfig& schedule) {
  if (!params.is_auto("warmup_num_steps")) {
    schedule.warmup_steps = params.integer("warmup_num_steps", 0, kManySteps).value_or(1000);
    params.give("lr_schedule.warmup_steps", "warmup_num_steps");
  }
  const std::string type = params.text("warmup_type").value_or("log");
  require(type == "log" || type == "linear",
          fmt::format("{}: {} is not one of \"log\", \"linear\"", params.where("warmup_type"), in_quotes(type)));
  schedule.warmup = type == "log" ? LrScheduleConfig::Warmup::logarithmic : LrScheduleConfig::Warmup::linear;
  params.give("lr_schedule.warmup_type", "warmup_type");
  require(
      params.integer("last_batch_iteration", -1, kManySteps).value_or(-1) == -1,
      fmt::format("{}: a run goes on where its checkpoint stands; take it out", params.where("last_batch_iteration")));
}

// The rates at both ends of the warm-up of WarmupLR and WarmupDecayLR: they replace the optimizer's own, which WarmupLR
// alone keeps where no rate is given. Returns the lower one's share of the upper.
double read_rates(const std::string& type, const Part& params, Config& config) {
  double& lr = config.hyperparameters.lr;
  const bool keeps = type == "WarmupLR" && !params.has("warmup_max_lr");
  if (!keeps && !params.is_auto("warmup_max_lr")) {
    const double most = params.number("warmup_max_lr").value_or(0.001);
    DeepSpeedFile& file = params.file();
    if (file.loaded.origins.contains("optimizer.lr") && most != lr) {
      file.loaded.warnings.push_back(fmt::format("{}: {} replaces the optimizer's lr {}, as it does in DeepSpeed",
                                                 params.where("warmup_max_lr"), most, lr));
    }
    lr = most;
    params.give("optimizer.lr", "warmup_max_lr");
  }
  const double least = params.number("warmup_min_lr").value_or(0);
  require(
      least == 0 || params.file().loaded.origins.contains("optimizer.lr"),
      fmt::format("{}: {} is the lower end of a rate that the file does not say; give the upper one a number, or take "
                  "this out",
                  params.where("warmup_min_lr"), least));
  require(least >= 0 && least <= lr && std::isfinite(lr),
          fmt::format("{}: {} is not from 0 to the rate after warm-up, {}", params.where("warmup_min_lr"), least, lr));
  return lr > 0 ? least / lr : 0;
}

double read_ratio(const Part& params, const char* key, double otherwise) {
  const double ratio = params.number(key).value_or(otherwise);
  require(ratio >= 0 && ratio <= 1, fmt::format("{}: {} is not from 0 to 1", params.where(key), ratio));
  return ratio;
}

void read_end(const Part& params, LrScheduleConfig& schedule) {
  if (params.is_auto("total_num_steps")) return;
  const std::optional<std::int64_t> steps = params.integer("total_num_steps", 1, kManySteps);
  require(steps.has_value(), fmt::format("{}: is needed; give the number of steps, or \"auto\" where the program "
                                         "knows it",
                                         params.where("total_num_steps")));
  schedule.total_steps = *steps;
  params.give("lr_schedule.total_steps", "total_num_steps");
}

void refuse_keys(const Part& params, const std::string& type, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    require(!params.has(key), fmt::format("{}: {} has no such parameter; take it out", params.where(key), type));
  }
}

void read_scheduler_params(const std::string& type, const Part& params, Config& config) {
  LrScheduleConfig& schedule = config.lr_schedule;
  read_warmup(params, schedule);
  params.give("lr_schedule.warmup_start", type == "WarmupCosineLR" ? "warmup_min_ratio" : "warmup_min_lr");
  if (type == "WarmupCosineLR") {
    refuse_keys(params, type, {"warmup_min_lr", "warmup_max_lr"});
    schedule.warmup_start = read_ratio(params, "warmup_min_ratio", 0);
    schedule.kind = LrScheduleConfig::Kind::cosine;
    schedule.final_factor = read_ratio(params, "cos_min_ratio", 0.0001);
    params.give("lr_schedule.final_factor", "cos_min_ratio");
    return read_end(params, schedule);
  }
  refuse_keys(params, type, {"warmup_min_ratio", "cos_min_ratio"});
  schedule.warmup_start = read_rates(type, params, config);
  if (type == "WarmupLR") return refuse_keys(params, type, {"total_num_steps"});
  schedule.kind = LrScheduleConfig::Kind::linear;
  schedule.final_factor = schedule.warmup_start;
  params.give("lr_schedule.final_factor", "warmup_min_lr");
  read_end(params, schedule);
}

void read_scheduler(const Part& top, Config& config) {
  const std::optional<Part> scheduler = top.part("scheduler");
  if (!scheduler) return;
  const std::optional<std::string> type = scheduler->text("type");
  constexpr std::array kTypes = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
  const bool known = type && std::find(kTypes.begin(), kTypes.end(), *type) != kTypes.end();
  require(known, fmt::format("{}: {} is not available; use one of WarmupLR, WarmupDecayLR, WarmupCosineLR",
                             scheduler->where("type"), type ? in_quotes(*type) : "none"));
  const json none = json::object();
  const json* params = scheduler->find("params");
  scheduler->give("lr_schedule.type", "type");
  read_scheduler_params(
      *type, params != nullptr ? *scheduler->part("params") : Part(none, "scheduler.params", top.file()), config);
}

// ---- the rest ------------------------------------------------------------------------------------

void read_batch_sizes(const Part& top, int ranks, LoadedConfig& loaded) {
  const auto batch = top.integer("train_batch_size", 1, kManyRows);
  auto micro = top.integer("train_micro_batch_size_per_gpu", 1, kManyRows);
  auto count = top.integer("gradient_accumulation_steps", 1, kManyRows);
  const auto mismatch = [&](const std::string& found) {
    return fmt::format(
        "{}: train_batch_size {} is not train_micro_batch_size_per_gpu {} x gradient_accumulation_steps {} x {} "
        "rank{}{}",
        top.file().source, *batch, micro ? std::to_string(*micro) : "(not given)",
        count ? std::to_string(*count) : "(not given)", ranks, ranks == 1 ? "" : "s", found);
  };
  if (batch && micro && count)
    require(*batch == *micro * *count * ranks, mismatch(fmt::format(" = {}", *micro * *count * ranks)));
  const char* micro_key = micro ? "train_micro_batch_size_per_gpu" : "train_batch_size";
  const char* count_key = count ? "gradient_accumulation_steps" : "train_batch_size";
  if (batch && micro && !count) {
    require(*batch % (*micro * ranks) == 0, mismatch("; it must divide"));
    count = *batch / (*micro * ranks);
  } else if (batch && !micro) {
    require(*batch % (count.value_or(1) * ranks) == 0, mismatch("; it must divide"));
    micro = *batch / (count.value_or(1) * ranks);
    count = count.value_or(1);
  } else if (micro && !count && !top.is_auto("gradient_accumulation_steps")) {
    count = 1;
    count_key = "train_micro_batch_size_per_gpu";
  }
  if (micro) top.give("micro_batch", micro_key);
  if (count) top.give("accumulation", count_key);
  if (micro) loaded.micro_batch = *micro * ranks;
  loaded.config.accumulation = count.value_or(0);
}

void read_clipping(const Part& top, LoadedConfig& loaded) {
  if (top.is_auto("gradient_clipping")) return;
  const std::optional<double> limit = top.number("gradient_clipping");
  loaded.config.clip_norm = limit.value_or(1.0);
  top.give("clip_norm", "gradient_clipping");
  if (limit) return;
  loaded.warnings.push_back(fmt::format(
      "{}: gradient_clipping is not given: 1.0, DeepSpeed's default since 0.19.3; give 0 for none", top.file().source));
}

}  // namespace

LoadedConfig read_deepspeed_config(const json& document, const std::string& source, int ranks) {
  DeepSpeedFile file{source, {}, {}};
  const json plain = with_present_names(without_dots(document, source), source);
  const Part top(plain, "", file);
  Config& config = file.loaded.config;
  require(
      top.integer("sequence_parallel_size", 1, kManyRows).value_or(1) == 1,
      fmt::format("{}: one process trains on one device; use 1 or take it out", top.where("sequence_parallel_size")));
  read_batch_sizes(top, ranks, file.loaded);
  read_precision(top, config);
  read_zero(top, config);
  read_optimizer(top, config);
  read_scheduler(top, config);
  read_clipping(top, file.loaded);
  if (!file.ignored.empty()) {
    file.loaded.warnings.push_back(fmt::format("{}: without effect here: {}", source, fmt::join(file.ignored, ", ")));
  }
  return std::move(file.loaded);
}

}  // namespace spillway
