// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <optional>
#include <string>

#include "spillway/core/error.h"
#include "state/model_config_parts.h"

namespace spillway {
namespace {

constexpr double kDefaultTheta = 10000.0;
constexpr NumberRange kTheta{0, 1e15, true};
constexpr NumberRange kFactor{1, 1e9};
constexpr NumberRange kFrequencyFactor{0, 1e9, true};

struct Rope {
  std::optional<double> theta;
  RopeScaling scaling;

  bool operator==(const Rope&) const = default;
};

RopeScaling::Type read_type(ConfigKeys& keys) {
  const std::string type = keys.text("type", "default");
  const std::string rope_type = keys.text("rope_type", type);
  if (keys.has("type") && rope_type != type) keys.fail("rope_type", fmt::format("\"type\" says \"{}\"", type));
  if (rope_type == "default") return RopeScaling::Type::none;
  if (rope_type == "linear") return RopeScaling::Type::linear;
  if (rope_type == "llama3") return RopeScaling::Type::llama3;
  keys.fail(keys.has("rope_type") ? "rope_type" : "type", "Spillway supports default, linear and llama3");
}

double read_required(ConfigKeys& keys, const char* key, NumberRange range) {
  if (!keys.has(key)) keys.fail(key, "this type of rope needs it");
  return keys.number(key, 0, range);
}

void read_llama3(ConfigKeys& keys, ConfigKeys& top, std::int64_t max_position, RopeScaling& out) {
  constexpr const char* kOriginal = "original_max_position_embeddings";
  out.low_freq_factor = read_required(keys, "low_freq_factor", kFrequencyFactor);
  out.high_freq_factor = read_required(keys, "high_freq_factor", kFrequencyFactor);
  if (out.high_freq_factor <= out.low_freq_factor) keys.fail("high_freq_factor", "it must be above low_freq_factor");
  const std::int64_t outer = top.integer(kOriginal, max_position, limits::kPositions);
  out.original_max_position = keys.integer(kOriginal, outer, limits::kPositions);
  if (top.has(kOriginal) && out.original_max_position != outer) {
    keys.fail(kOriginal, fmt::format("the one outside says {}", outer));
  }
}

// One of the two objects that may say it; `top` is the configuration around it.
std::optional<Rope> read_object(ConfigKeys& top, const std::string& name, std::int64_t max_position) {
  const nlohmann::json* object = top.find(name);
  if (object == nullptr || object->is_null()) return std::nullopt;
  if (!object->is_object()) top.fail(name, "expected an object or null");
  if (object->empty()) return std::nullopt;

  ConfigKeys keys(*object, top.source(), top.path() + name + ".");
  Rope rope;
  rope.scaling.type = read_type(keys);
  if (keys.has("rope_theta")) rope.theta = keys.number("rope_theta", kDefaultTheta, kTheta);
  keys.only("partial_rotary_factor", "[1, null]");
  if (rope.scaling.type != RopeScaling::Type::none) rope.scaling.factor = read_required(keys, "factor", kFactor);
  if (rope.scaling.type == RopeScaling::Type::llama3) read_llama3(keys, top, max_position, rope.scaling);
  keys.reject_unknown({});
  return rope;
}

// The base frequency that stands outside and may stand inside too.
double theta_of(ConfigKeys& keys, const char* key, double missing, const Rope& rope) {
  const double outer = keys.number(key, missing, kTheta);
  if (rope.theta && keys.has(key) && *rope.theta != outer) {
    keys.fail(key, fmt::format("the rope object beside it says {}; keep one of the two", *rope.theta));
  }
  return rope.theta.value_or(outer);
}

}  // namespace

void read_rope(ConfigKeys& keys, ModelConfig& config) {
  keys.only("partial_rotary_factor", "[1, null]");
  keys.only("rope_interleaved", "[false]");
  keys.find("original_max_position_embeddings");  // has a meaning for llama3 only, and is read there
  const auto older = read_object(keys, "rope_scaling", config.max_position);
  const auto newer = read_object(keys, "rope_parameters", config.max_position);
  if (older && newer && *older != *newer) {
    keys.fail("rope_scaling", "\"rope_parameters\" says something else; keep one of the two");
  }
  const Rope rope = newer ? *newer : older.value_or(Rope{});
  config.rope_theta = theta_of(keys, "rope_theta", kDefaultTheta, rope);
  config.rope = rope.scaling;
}

void read_rope_of_layer_kinds(ConfigKeys& keys, ModelConfig& config) {
  constexpr double kDefaultGlobalTheta = 1e6;
  constexpr const char *kNested = "rope_parameters", *kSliding = "sliding_attention";
  std::optional<Rope> full = read_object(keys, "rope_scaling", config.max_position), sliding;
  const nlohmann::json* nested = keys.find(kNested);
  if (nested != nullptr && !nested->is_null()) {
    if (!nested->is_object()) keys.fail(kNested, "expected an object or null");
    ConfigKeys kinds(*nested, keys.source(), std::string(kNested) + ".");
    const auto newer = read_object(kinds, "full_attention", config.max_position);
    if (newer && full && *newer != *full) {
      keys.fail("rope_scaling", "\"rope_parameters\" says something else; keep one of the two");
    }
    if (newer) full = newer;
    sliding = read_object(kinds, kSliding, config.max_position);
    if (sliding && sliding->scaling.type != RopeScaling::Type::none) {
      kinds.fail(kSliding, "Spillway scales the frequencies of the layers that do not slide alone");
    }
    kinds.reject_unknown({});
  }
  config.rope_theta = theta_of(keys, "rope_theta", kDefaultGlobalTheta, full.value_or(Rope{}));
  config.sliding_rope_theta = theta_of(keys, "rope_local_base_freq", kDefaultTheta, sliding.value_or(Rope{}));
  config.rope = full.value_or(Rope{}).scaling;
}

}  // namespace spillway
