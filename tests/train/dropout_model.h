// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/models/causal_lm.h"

namespace spillway::test {

/// A small GPT-2 that drops a fifth of everything that may be dropped.
inline std::shared_ptr<CausalLM> gpt2_with_dropout() {
  ModelConfig config;
  config.family = ModelFamily::gpt2;
  config.vocabulary = 64;
  config.hidden = 32;
  config.intermediate = 64;
  config.layers = 2;
  config.heads = config.kv_heads = 4;
  config.head_dim = 8;
  config.max_position = 32;
  config.tied_head = true;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0.2;
  return make_causal_lm(config, 3);
}

}  // namespace spillway::test
