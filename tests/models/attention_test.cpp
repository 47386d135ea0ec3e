// SPDX-License-Identifier: Apache-2.0
// What a position may see, and the element types a model works in.
#include <cmath>

#include "models/model_support.h"

namespace spillway::test {
namespace {

torch::Tensor logits_of(CausalLM& model, const torch::Tensor& tokens) {
  const torch::NoGradGuard no_grad;
  model.eval();
  return model.forward(tokens);
}

ModelConfig one_layer(std::optional<std::int64_t> window) {
  ModelConfig config = small_llama();
  config.layers = 1;
  config.sliding_window = window;
  return config;
}

TEST(Attention, SeesNothingOfTheFuture) {
  for (const ModelFamily family : kAllFamilies) {
    const auto model = perturbed(small_model(family));
    torch::Tensor tokens = some_tokens(1, 20);
    const torch::Tensor before = logits_of(*model, tokens);
    tokens[0][12] = (tokens[0][12] + 1).remainder(64);
    const torch::Tensor after = logits_of(*model, tokens);
    EXPECT_TRUE(torch::equal(before.narrow(1, 0, 12), after.narrow(1, 0, 12)));
    EXPECT_FALSE(torch::equal(before[0][12], after[0][12]));
  }
}

TEST(SlidingWindow, AsLongAsTheRowsIsNone) {
  const torch::Tensor tokens = some_tokens(2, 20);
  const auto full = perturbed(one_layer(std::nullopt));
  EXPECT_TRUE(torch::equal(logits_of(*perturbed(one_layer(20)), tokens), logits_of(*full, tokens)));
  EXPECT_FALSE(torch::equal(logits_of(*perturbed(one_layer(19)), tokens), logits_of(*full, tokens)));
}

// Rotary positions are relative, so one layer sees through a window what it would see of those positions alone.
TEST(SlidingWindow, IsARowCutToTheWindow) {
  const std::int64_t window = 5;
  const torch::Tensor tokens = some_tokens(1, 20);
  const torch::Tensor windowed = logits_of(*perturbed(one_layer(window)), tokens);
  const auto full = perturbed(one_layer(std::nullopt));
  for (std::int64_t position = window - 1; position < 20; ++position) {
    const torch::Tensor cut = tokens.narrow(1, position - window + 1, window);
    EXPECT_LT(largest_difference(logits_of(*full, cut)[0][window - 1], windowed[0][position]), 1e-5) << position;
  }
}

TEST(SlidingWindow, MayBeOfSomeLayersOnly) {
  const torch::Tensor tokens = some_tokens(1, 20);
  ModelConfig config = small_llama();
  const torch::Tensor none = logits_of(*perturbed(config), tokens);
  config.sliding_window = 4;
  const torch::Tensor both = logits_of(*perturbed(config), tokens);
  config.layer_slides = {true, true};
  EXPECT_TRUE(torch::equal(logits_of(*perturbed(config), tokens), both));
  config.layer_slides = {false, false};
  EXPECT_TRUE(torch::equal(logits_of(*perturbed(config), tokens), none));
  config.layer_slides = {true, false};
  const torch::Tensor first = logits_of(*perturbed(config), tokens);
  config.layer_slides = {false, true};
  const torch::Tensor second = logits_of(*perturbed(config), tokens);
  for (const torch::Tensor& other : {none, both, second}) EXPECT_FALSE(torch::equal(first, other));
}

// The two kinds of layers count positions by frequencies of their own.
TEST(SlidingWindow, MayHaveItsOwnRotaryFrequencies) {
  const torch::Tensor tokens = some_tokens(1, 20);
  ModelConfig config = small_gemma(ModelFamily::gemma3);
  const torch::Tensor both = logits_of(*perturbed(config), tokens);
  ModelConfig changed = config;
  changed.sliding_rope_theta = 501;
  EXPECT_FALSE(torch::equal(logits_of(*perturbed(changed), tokens), both));
  changed = config;
  changed.rope = {.type = RopeScaling::Type::linear, .factor = 2};
  EXPECT_FALSE(torch::equal(logits_of(*perturbed(changed), tokens), both));
  config.layer_slides = {};  // all slide: what the others would scale does not matter
  changed = config;
  changed.rope = {.type = RopeScaling::Type::linear, .factor = 2};
  EXPECT_TRUE(torch::equal(logits_of(*perturbed(changed), tokens), logits_of(*perturbed(config), tokens)));
}

TEST(Softcap, BendsLogitsTowardsItsLimit) {
  ModelConfig config = small_gemma(ModelFamily::gemma2);
  const torch::Tensor tokens = some_tokens(2, 20);
  config.logit_softcap = 0.5;  // below the largest logit
  const torch::Tensor bent = logits_of(*perturbed(config), tokens);
  config.logit_softcap = std::nullopt;
  const torch::Tensor plain = logits_of(*perturbed(config), tokens);
  EXPECT_GT(plain.abs().max().item<double>(), 0.5);
  EXPECT_LT(bent.abs().max().item<double>(), 0.5);
  EXPECT_LT(largest_difference(bent, (plain / 0.5).tanh() * 0.5), 1e-6);
}

TEST(Attention, LengthsAndModesMayAlternate) {
  const auto model = perturbed(small_llama());
  const torch::Tensor tokens = some_tokens(2, 20);
  {
    const c10::InferenceMode inference;
    model->forward(tokens);  // must not leave constants behind that training cannot use
  }
  const torch::Tensor expected = model->forward(tokens);
  expected.sum().backward();
  model->forward(some_tokens(1, 7));
  EXPECT_TRUE(torch::equal(model->forward(tokens), expected));
}

TEST(WorkingTypes, SixteenBitFollowsFp32) {
  for (const ModelFamily family : kAllFamilies) {
    const ModelConfig config = small_model(family);
    const auto wide = perturbed(config);
    const torch::Tensor tokens = some_tokens(2, 16);
    const auto loss_of = [&](CausalLM& model) {
      return next_token_loss(model.forward(tokens), tokens.roll(-1, 1), tokens.numel());
    };
    loss_of(*wide).backward();
    for (const auto& [type, tolerance] : {std::pair(DType::bf16, 0.04), std::pair(DType::f16, 0.005)}) {
      const auto narrow = make_causal_lm(config, 2, type);
      perturb(*narrow);
      EXPECT_EQ(narrow->forward(tokens).scalar_type(), narrow->parameters().front().scalar_type());
      loss_of(*narrow).backward();
      double error = 0, size = 0;
      for (const auto& item : narrow->named_parameters()) {
        const torch::Tensor expected = wide->named_parameters()[item.key()].grad();
        ASSERT_EQ(item.value().grad().scalar_type(), item.value().scalar_type()) << item.key();
        const torch::Tensor difference = item.value().grad().to(torch::kFloat) - expected;
        EXPECT_LT(difference.norm().item<double>(), 5 * tolerance * expected.norm().item<double>())
            << item.key() << " in " << to_string(type);
        error += difference.square().sum().item<double>();
        size += expected.square().sum().item<double>();
      }
      EXPECT_LT(std::sqrt(error), tolerance * std::sqrt(size)) << to_string(type);
    }
  }
}

}  // namespace
}  // namespace spillway::test
