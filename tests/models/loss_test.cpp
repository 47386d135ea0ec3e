// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

TEST(Loss, SumsOverTargetsThatCount) {
  const torch::Tensor logits = torch::tensor({{{0.0F, std::log(3.0F)}, {1.0F, 1.0F}, {100.0F, -100.0F}}});
  const torch::Tensor targets = torch::tensor({{std::int64_t{1}, std::int64_t{0}, kIgnoredTarget}});
  EXPECT_EQ(count_targets(targets), 2);
  const double expected = std::log(4.0 / 3.0) + std::log(2.0);
  EXPECT_NEAR(next_token_loss_sum(logits, targets).item<double>(), expected, 1e-6);
  EXPECT_NEAR(next_token_loss(logits, targets, 2).item<double>(), expected / 2, 1e-6);
}

TEST(Loss, IsComputedInFp32) {
  const torch::Tensor logits = some_tokens(2, 64).to(torch::kBFloat16).div(10).view({2, 1, 64});
  const torch::Tensor targets = torch::tensor({{std::int64_t{3}}, {std::int64_t{9}}});
  const torch::Tensor loss = next_token_loss_sum(logits, targets);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(loss, next_token_loss_sum(logits.to(torch::kFloat), targets)));
}

TEST(Loss, OfNoTargetIsZeroAndHasNoGradient) {
  const torch::Tensor logits = torch::ones({1, 3, 4}, torch::requires_grad());
  const torch::Tensor targets = torch::full({1, 3}, kIgnoredTarget, torch::kLong);
  EXPECT_EQ(count_targets(targets), 0);
  const torch::Tensor loss = next_token_loss(logits, targets, 0);
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
  EXPECT_EQ(logits.grad().abs().max().item<double>(), 0);
}

TEST(Loss, RefusesShapesThatDoNotGoTogether) {
  EXPECT_THROW(next_token_loss_sum(torch::ones({1, 3, 4}), torch::zeros({3}, torch::kLong)), InvalidArgument);
}

TEST(Generation, IsTheLikeliestNextTokenOneByOne) {
  const auto model = load_causal_lm(golden("llama"));
  const std::vector<std::int64_t> prompt{3, 5, 7};
  const auto text = generate_greedy(*model, prompt, 6);
  ASSERT_EQ(text.size(), 9U);
  const torch::NoGradGuard no_grad;
  const torch::Tensor logits = model->forward(torch::tensor(text).unsqueeze(0))[0];
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(text[i], prompt[i]);
  for (std::int64_t i = 3; i < 9; ++i) {
    EXPECT_EQ(logits[i - 1].argmax().item<std::int64_t>(), text[static_cast<std::size_t>(i)]);
  }
  const auto stopped = generate_greedy(*model, prompt, 6, text[3]);
  EXPECT_EQ(stopped, std::vector<std::int64_t>(text.begin(), text.begin() + 4));
}

TEST(Generation, GoesOnBeyondThePositionsOfTheModel) {
  const auto model = make_causal_lm(small_gpt2(), 1);
  std::vector<std::int64_t> prompt(30, 1);
  const auto text = generate_greedy(*model, prompt, 8);
  ASSERT_EQ(text.size(), 38U);
  const std::vector<std::int64_t> context(text.end() - 33, text.end() - 1);
  EXPECT_EQ(generate_greedy(*model, context, 1).back(), text.back());
}

TEST(Generation, LeavesModeAndGradientsAsTheyWere) {
  ModelConfig config = small_gpt2();
  config.embedding_dropout = 0.9;
  const auto model = make_causal_lm(config, 1);
  model->train();
  const auto first = generate_greedy(*model, {1}, 8);
  EXPECT_EQ(generate_greedy(*model, {1}, 8), first) << "dropout acted";
  EXPECT_TRUE(model->is_training());
  EXPECT_THROW(generate_greedy(*model, {64}, 1), InvalidArgument);
  EXPECT_THROW(generate_greedy(*model, {}, 1), InvalidArgument);
  EXPECT_TRUE(model->is_training());
  EXPECT_TRUE(model->forward(some_tokens(1, 4)).requires_grad());
  model->eval();
  generate_greedy(*model, {1}, 1);
  EXPECT_FALSE(model->is_training());
}

}  // namespace
}  // namespace spillway::test
