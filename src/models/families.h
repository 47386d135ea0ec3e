// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/models/causal_lm.h"

namespace spillway {

/// One function a family, each in a file of its own: the model with parameters allocated by `options`, not initialised.
std::shared_ptr<CausalLM> make_gpt2(const ModelConfig& config, const torch::TensorOptions& options);
/// Llama, Mistral, Qwen2 and 3, Gemma 2 and 3: what differs between them is in the configuration.
std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const torch::TensorOptions& options);

}  // namespace spillway
