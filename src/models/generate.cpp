// SPDX-License-Identifier: Apache-2.0
#include "spillway/models/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "models/attention.h"
#include "models/block_inputs.h"
#include "models/evaluation_mode.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

using torch::Tensor;

void check_options(const GenerateOptions& o) {
  require(o.max_new_tokens >= 0, fmt::format("{} new tokens were asked for; expected 0 or more.", o.max_new_tokens));
  require(std::isfinite(o.temperature) && o.temperature >= 0,
          fmt::format("A temperature of {} was asked for; expected 0 (the likeliest token) or more.", o.temperature));
  require(o.top_p > 0 && o.top_p <= 1,
          fmt::format("A top_p of {} was asked for; expected more than 0, and at most 1 (all tokens).", o.top_p));
  require(o.top_k >= 0, fmt::format("A top_k of {} was asked for; expected 0 (all tokens) or more.", o.top_k));
}

// Chooses tokens from logits. Numbers are drawn without the standard library's distributions, which differ between
// implementations.
class Chooser {
 public:
  explicit Chooser(const GenerateOptions& options) : options_(options), random_(options.seed) {}

  std::int64_t choose(const Tensor& logits) {
    if (options_.temperature == 0) return logits.argmax().item<std::int64_t>();
    rank(logits);
    double left = static_cast<double>(random_() >> 11U) * 0x1p-53 * cut_to_top_p();
    for (const Candidate& candidate : candidates_) {
      left -= candidate.weight;
      if (left < 0) return candidate.token;
    }
    return candidates_.back().token;  // the sum's last bits
  }

 private:
  struct Candidate {
    double weight = 0;
    std::int64_t token = 0;
  };

  // The tokens that top_k leaves, each with exp((logit - largest) / temperature).
  void rank(const Tensor& logits) {
    const Tensor host = logits.to(torch::kCPU, torch::kFloat).contiguous();
    const float* values = host.const_data_ptr<float>();
    candidates_.clear();
    for (std::int64_t token = 0; token < host.numel(); ++token) {
      if (std::isnan(values[token])) {
        throw StateError(
            fmt::format("The logit of token {} is not a number, so none can be drawn: are the model's "
                        "weights finite?",
                        token));
      }
      candidates_.push_back({values[token], token});
    }
    keep_likeliest();
    double largest = candidates_.front().weight;
    for (const Candidate& candidate : candidates_) largest = std::max(largest, candidate.weight);
    for (Candidate& candidate : candidates_) {
      // The largest by itself: infinity less infinity is no number.
      const bool is_largest = candidate.weight == largest;
      candidate.weight = is_largest ? 1 : std::exp((candidate.weight - largest) / options_.temperature);
    }
  }

  // Puts the likeliest first, and drops those over top_k; where none can be dropped, the order is of no use.
  void keep_likeliest() {
    if (options_.top_k == 0 && options_.top_p == 1) return;
    const auto likelier = [](const Candidate& a, const Candidate& b) {
      return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
    };
    const auto all = static_cast<std::int64_t>(candidates_.size());
    const std::int64_t kept = options_.top_k == 0 ? all : std::min(options_.top_k, all);
    std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), likelier);
    candidates_.resize(static_cast<std::size_t>(kept));
  }

  // Returns the sum of the weights that are left.
  double cut_to_top_p() {
    double sum = 0;
    for (const Candidate& candidate : candidates_) sum += candidate.weight;
    if (options_.top_p == 1) return sum;
    double kept = 0;
    std::size_t count = 0;
    while (count < candidates_.size() && kept < options_.top_p * sum) kept += candidates_[count++].weight;
    candidates_.resize(count);
    return kept;
  }

  const GenerateOptions& options_;
  std::mt19937_64 random_;
  std::vector<Candidate> candidates_;
};

// The last `length` tokens of a text, where the model is.
Tensor last_tokens(std::vector<std::int64_t>& text, std::int64_t length, torch::Device device) {
  std::int64_t* first = text.data() + (static_cast<std::int64_t>(text.size()) - length);
  return torch::from_blob(first, {1, length}, torch::kLong).to(device, torch::kLong, false, /*copy=*/true);
}

}  // namespace

Decoder::Decoder(CausalLM& model, std::int64_t rows, std::int64_t capacity)
    : model_(model), rows_(rows), capacity_(capacity) {
  const ModelConfig& config = model.config();
  require(rows >= 1, fmt::format("A decoder of {} rows was asked for; expected at least 1.", rows));
  require(capacity >= 1 && capacity <= config.max_position,
          fmt::format("A decoder for {} positions was asked for; expected 1 to {}, the model's positions.", capacity,
                      config.max_position));
  const Tensor parameter = model.parameters().front();
  const auto options = torch::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const std::int64_t fit = layer_slides(config, layer) ? std::min(capacity, *config.sliding_window) : capacity;
    const std::vector<std::int64_t> shape{rows, config.kv_heads, fit, config.head_dim};
    layers_.push_back({at::empty(shape, options), at::empty(shape, options)});
  }
}

void Decoder::check(const Tensor& tokens) const {
  const bool fits =
      tokens.dim() == 2 && tokens.scalar_type() == torch::kLong && tokens.size(0) == rows_ && tokens.size(1) >= 1;
  if (fits) return;
  throw InvalidArgument(fmt::format("This decoder reads tokens [{}, length] of type int64; got {} of type {}.", rows_,
                                    c10::str(tokens.sizes()), c10::toString(tokens.scalar_type())));
}

void Decoder::give_cache(std::int64_t layer, std::int64_t count, std::int64_t length, BlockInputs& inputs) const {
  const Kept& kept = layers_[static_cast<std::size_t>(layer)];
  const std::int64_t fit = kept.keys.size(2), stored = std::min(count, fit);
  // A start puts its last positions in order; from then on each takes the next place, the oldest one's when all are
  // taken. Softmax does not ask for order: positions are in the keys.
  const std::int64_t position = length - count;
  const std::int64_t place = position == 0 ? 0 : (first_ >= fit ? position - first_ : position) % fit;
  const std::int64_t seen = std::min(length, fit);
  inputs.new_keys = kept.keys.narrow(2, place, stored);
  inputs.new_values = kept.values.narrow(2, place, stored);
  inputs.keys = kept.keys.narrow(2, 0, seen);
  inputs.values = kept.values.narrow(2, 0, seen);
}

Tensor Decoder::read(BlockInputs inputs, std::int64_t count) {
  const torch::NoGradGuard no_grad;
  const EvaluationMode evaluation(model_);
  const auto layers = static_cast<std::size_t>(model_.config().layers);
  const std::int64_t length = std::exchange(length_, 0) + count;
  const Tensor logits = model_.run(std::move(inputs), [&](std::size_t block, BlockInputs& next) {
    if (block >= 1 && block <= layers) {
      give_cache(static_cast<std::int64_t>(block) - 1, count, length, next);
    } else if (block > layers) {
      next = {.hidden = next.hidden.narrow(1, count - 1, 1)};  // the logits of other positions are not asked for
    }
  });
  length_ = length;
  return logits.select(1, 0);
}

Tensor Decoder::start(const Tensor& tokens) {
  check(tokens);
  const std::int64_t count = tokens.size(1);
  require(count <= capacity_,
          fmt::format("{} tokens are more than the {} positions that the decoder was made for.", count, capacity_));
  length_ = 0;
  first_ = count;
  return read({.hidden = tokens}, count);
}

Tensor Decoder::next(const Tensor& tokens) {
  check(tokens);
  require(tokens.size(1) == 1, fmt::format("One token a row is read at a time; got {}.", tokens.size(1)));
  if (length_ == 0) throw StateError("A decoder reads a beginning first: start(tokens).");
  if (length_ == capacity_) {
    throw StateError(
        fmt::format("All {} positions of the decoder are used: start again from the text's last tokens.", capacity_));
  }
  const Tensor position = at::full({1, 1}, length_, tokens.options());
  BlockInputs inputs{.hidden = tokens};
  model_.constants()->set_positions(inputs, position, layers_.front().keys.scalar_type());
  return read(std::move(inputs), 1);
}

void Decoder::pretend(std::int64_t length) {
  require(layers_.front().keys.is_meta(),
          "Only on a model without memory (meta_causal_lm) can positions be pretended.");
  require(length >= 1 && length <= capacity_,
          fmt::format("{} positions are to be pretended; expected 1 to {}.", length, capacity_));
  length_ = length;
}

std::vector<std::int64_t> generate(CausalLM& model, std::vector<std::int64_t> prompt, const GenerateOptions& options) {
  check_options(options);
  require(!prompt.empty(), "A prompt needs at least one token.");
  for (const std::int64_t token : prompt) {
    require(token >= 0 && token < model.config().vocabulary,
            fmt::format("Token {} of the prompt is not in the vocabulary of {}.", token, model.config().vocabulary));
  }
  if (options.max_new_tokens == 0) return prompt;
  const torch::NoGradGuard no_grad;
  const torch::Device device = model.parameters().front().device();
  const std::int64_t most = model.config().max_position;
  const std::int64_t first = std::min(static_cast<std::int64_t>(prompt.size()), most);
  // The last token is not read any more.
  Decoder decoder(model, 1, first + std::min(options.max_new_tokens - 1, most - first));
  Chooser chooser(options);
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const bool full = decoder.length() == most;
    const std::int64_t again = full ? std::max<std::int64_t>(most / 2, 1) : first;
    const Tensor logits = i == 0 || full ? decoder.start(last_tokens(prompt, again, device))
                                         : decoder.next(last_tokens(prompt, 1, device));
    prompt.push_back(chooser.choose(logits[0]));
    if (prompt.back() == options.stop_token) break;
  }
  return prompt;
}

std::vector<std::int64_t> generate_greedy(CausalLM& model, std::vector<std::int64_t> prompt,
                                          std::int64_t max_new_tokens, std::optional<std::int64_t> stop_token) {
  return generate(model, std::move(prompt), {.max_new_tokens = max_new_tokens, .stop_token = stop_token});
}

}  // namespace spillway
