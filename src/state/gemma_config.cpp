// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "state/model_config_parts.h"

namespace spillway {
namespace {

constexpr NumberRange kSoftcap{0, 1e9, true};
constexpr const char* kActivation = "gelu_pytorch_tanh";

std::optional<double> read_softcap(ConfigKeys& keys, const char* key, std::optional<double> missing) {
  const nlohmann::json* value = keys.find(key);
  if (value == nullptr) return missing;
  if (value->is_null()) return std::nullopt;
  return keys.number(key, 0, kSoftcap);
}

// transformers reads hidden_activation alone; many files carry the older key too.
void read_gemma_activation(ConfigKeys& keys, ModelConfig& config) {
  config.activation = read_activation(keys, "hidden_activation", kActivation);
  if (keys.has("hidden_act") && read_activation(keys, "hidden_act", kActivation) != config.activation) {
    keys.fail("hidden_act", "\"hidden_activation\" is what counts in this family, and says or means another one");
  }
}

// Layers slide but for each second (Gemma 2), or each sliding_window_pattern-th (Gemma 3).
void read_gemma_window(ConfigKeys& keys, ModelConfig& config) {
  constexpr std::int64_t kWindow = 4096, kPattern = 6;
  const auto window = keys.integer_or_null("sliding_window", kWindow, limits::kPositions);
  std::int64_t pattern = 2;
  if (config.family == ModelFamily::gemma3) {
    pattern = keys.integer("sliding_window_pattern", kPattern, limits::kCount);
    keys.find("_sliding_window_pattern");  // what transformers notes beside the layer_types it made
  } else if (keys.has("sliding_window_size") &&
             keys.integer_or_null("sliding_window_size", window, limits::kPositions) != window) {
    keys.fail("sliding_window_size", "\"sliding_window\" is what counts, and says or means another one");
  }
  std::vector<bool> slides = read_layer_types(keys, config.layers);
  if (slides.empty()) {
    for (std::int64_t i = 1; i <= config.layers; ++i) slides.push_back(i % pattern != 0);
  }
  const auto count = std::count(slides.begin(), slides.end(), true);
  if (count == 0) return;
  if (!window) keys.fail("sliding_window", "some layers slide, and need one");
  config.sliding_window = window;
  if (count != config.layers) config.layer_slides = std::move(slides);
}

}  // namespace

void read_gemma(ConfigKeys& keys, ModelConfig& config) {
  config.norm_plus_one = config.branch_norms = config.scale_embedding = true;
  const bool second = config.family == ModelFamily::gemma2;
  config.query_pre_attn_scalar = keys.integer("query_pre_attn_scalar", 256, limits::kPositions);
  config.logit_softcap =
      read_softcap(keys, "final_logit_softcapping", second ? std::optional<double>(30) : std::nullopt);
  // transformers gives Gemma 3's attention no cap, whatever its file says.
  if (second) {
    config.attention_softcap = read_softcap(keys, "attn_logit_softcapping", 50);
  } else {
    keys.only("attn_logit_softcapping", "[null]");
  }
  keys.only("use_bidirectional_attention", "[false, null]");
  read_gemma_activation(keys, config);
  read_gemma_window(keys, config);
}

}  // namespace spillway
