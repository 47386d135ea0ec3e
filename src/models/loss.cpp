// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "spillway/core/error.h"
#include "spillway/models/causal_lm.h"

namespace spillway {

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

}  // namespace spillway
