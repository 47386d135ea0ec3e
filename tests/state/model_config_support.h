// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "formats/format_support.h"
#include "spillway/state/model_config.h"

namespace spillway::test {

inline ModelConfig parse_config(const std::string& json) {
  return ModelConfig::parse(json, "here/config.json");
}

inline std::string refusal(const std::string& json) {
  return message_of<InvalidArgument>([&] { parse_config(json); });
}

/// A small model of `type` with more keys; the sizes suit every family but GPT-2.
inline std::string small(std::string_view type, std::string_view more = "") {
  return fmt::format(R"({{"model_type":"{}","vocab_size":256,"hidden_size":64,"intermediate_size":160,)"
                     R"("num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,)"
                     R"("max_position_embeddings":128{}{}}})",
                     type, more.empty() ? "" : ",", more);
}

}  // namespace spillway::test
