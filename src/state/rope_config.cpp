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

  ConfigKeys keys(*object, top.source(), name + ".");
  Rope rope;
  rope.scaling.type = read_type(keys);
  if (keys.has("rope_theta")) rope.theta = keys.number("rope_theta", kDefaultTheta, kTheta);
  keys.only("partial_rotary_factor", "[1, null]");
  if (rope.scaling.type != RopeScaling::Type::none) rope.scaling.factor = read_required(keys, "factor", kFactor);
  if (rope.scaling.type == RopeScaling::Type::llama3) read_llama3(keys, top, max_position, rope.scaling);
  keys.reject_unknown({});
  return rope;
}

}  // namespace

void read_rope(ConfigKeys& keys, ModelConfig& config) {
  keys.only("partial_rotary_factor", "[1, null]");
  keys.only("rope_interleaved", "[false]");
  keys.find("original_max_position_embeddings");  // has a meaning for llama3 only, and is read there
  const double outer = keys.number("rope_theta", kDefaultTheta, kTheta);
  const auto older = read_object(keys, "rope_scaling", config.max_position);
  const auto newer = read_object(keys, "rope_parameters", config.max_position);
  if (older && newer && *older != *newer) {
    keys.fail("rope_scaling", "\"rope_parameters\" says something else; keep one of the two");
  }
  const Rope rope = newer ? *newer : older.value_or(Rope{});
  if (rope.theta && keys.has("rope_theta") && *rope.theta != outer) {
    keys.fail("rope_theta", fmt::format("the rope object beside it says {}; keep one of the two", *rope.theta));
  }
  config.rope_theta = rope.theta.value_or(outer);
  config.rope = rope.scaling;
}

}  // namespace spillway
