// SPDX-License-Identifier: Apache-2.0
#include "fuzz/target_support.h"
#include "fuzz/targets.h"
#include "spillway/state/lora_options.h"

namespace spillway::fuzz {
namespace {

ModelConfig some_model() {
  ModelConfig config;
  config.vocabulary = config.hidden = config.intermediate = config.max_position = 64;
  config.layers = 2;
  config.heads = config.kv_heads = 4;
  config.head_dim = 16;
  return config;
}

}  // namespace

bool lora_options(std::span<const std::byte> input) {
  try {
    const LoraOptions options = LoraOptions::parse(text_of(input), "adapter_config.json");
    options.validate();
    check(options.scaling() > 0, "what was accepted has a scale");
    for (const ParameterShape& parameter : lora_parameter_shapes(some_model(), options)) {
      check(parameter.numel() >= 64, "an adapter has elements");
    }
    return true;
  } catch (const InvalidArgument& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
