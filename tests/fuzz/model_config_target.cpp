// SPDX-License-Identifier: Apache-2.0
#include "fuzz/target_support.h"
#include "fuzz/targets.h"
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
  try {
    use(ModelConfig::parse(text_of(input), "config.json"));
    return true;
  } catch (const InvalidArgument& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
