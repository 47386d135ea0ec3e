// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "spillway/core/error.h"
#include "spillway/models/causal_lm.h"

namespace spillway {
namespace {

// Puts a model in evaluation mode, and back when done.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(was_training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool was_training_;
};

}  // namespace

std::int64_t count_targets(const torch::Tensor& targets) {
  return targets.ne(kIgnoredTarget).sum().item<std::int64_t>();
}

torch::Tensor next_token_loss_sum(const torch::Tensor& logits, const torch::Tensor& targets) {
  require(logits.dim() >= 1 && logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1)) == targets.sizes(),
          fmt::format("Logits {} do not go with targets {}: expected [..., vocabulary] and [...].",
                      c10::str(logits.sizes()), c10::str(targets.sizes())));
  const torch::Tensor rows = logits.reshape({-1, logits.size(-1)}).to(torch::kFloat);
  return at::cross_entropy_loss(rows, targets.reshape({-1}), {}, at::Reduction::Sum, kIgnoredTarget);
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets, std::int64_t valid_targets) {
  return next_token_loss_sum(logits, targets) / std::max<std::int64_t>(valid_targets, 1);
}

std::vector<std::int64_t> generate_greedy(CausalLM& model, std::vector<std::int64_t> prompt,
                                          std::int64_t max_new_tokens, std::optional<std::int64_t> stop_token) {
  require(!prompt.empty(), "A prompt needs at least one token.");
  for (const std::int64_t token : prompt) {
    require(token >= 0 && token < model.config().vocabulary,
            fmt::format("Token {} of the prompt is not in the vocabulary of {}.", token, model.config().vocabulary));
  }
  const torch::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const torch::Device device = model.parameters().front().device();
  for (std::int64_t i = 0; i < max_new_tokens; ++i) {
    const auto length = std::min(static_cast<std::int64_t>(prompt.size()), model.config().max_position);
    const torch::Tensor context =
        torch::from_blob(prompt.data() + (prompt.size() - static_cast<std::size_t>(length)), {1, length}, torch::kLong);
    const torch::Tensor logits = model.forward(context.to(device, torch::kLong, false, /*copy=*/true));
    prompt.push_back(logits[0][length - 1].argmax().item<std::int64_t>());
    if (prompt.back() == stop_token) break;
  }
  return prompt;
}

}  // namespace spillway
