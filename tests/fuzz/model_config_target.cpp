// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "fuzz/targets.h"
#include "spillway/core/error.h"
#include "spillway/state/model_config.h"

namespace spillway::fuzz {
namespace {

void use(const ModelConfig& config) {
  constexpr std::int64_t kFewLayers = 100;
  if (config.layers > kFewLayers) return;
  std::int64_t total = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    check(parameter.numel() > 0, "a parameter has elements");
    check(!__builtin_add_overflow(total, parameter.numel(), &total), "the elements can be counted");
  }
}

}  // namespace

bool model_config(std::span<const std::byte> input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    use(ModelConfig::parse(text, "config.json"));
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

}  // namespace spillway::fuzz
