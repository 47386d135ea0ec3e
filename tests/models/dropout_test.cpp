// SPDX-License-Identifier: Apache-2.0
#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

ModelConfig with_dropout(ModelConfig config) {
  config.attention_dropout = 0.1;
  if (config.family == ModelFamily::gpt2) config.embedding_dropout = config.residual_dropout = 0.2;
  return config;
}

class Dropout : public testing::TestWithParam<ModelFamily> {
 protected:
  void SetUp() override {
    const bool gpt2 = GetParam() == ModelFamily::gpt2;
    model = make_causal_lm(with_dropout(gpt2 ? small_gpt2() : small_llama()), 5);
    model->train();
  }

  torch::Tensor run() const {
    const torch::NoGradGuard no_grad;
    return model->forward(some_tokens(2, 20));
  }

  std::shared_ptr<CausalLM> model;
};

TEST_P(Dropout, DrawsTheSameMasksForTheSameSeed) {
  model->set_dropout_seed(11);
  const torch::Tensor first = run(), second = run();
  EXPECT_FALSE(torch::equal(first, second));
  model->set_dropout_seed(11);
  EXPECT_TRUE(torch::equal(run(), first));
  EXPECT_TRUE(torch::equal(run(), second));
  model->set_dropout_seed(12);
  EXPECT_FALSE(torch::equal(run(), first));
}

TEST_P(Dropout, NeitherReadsNorMovesTheGlobalGenerator) {
  torch::manual_seed(1);
  model->set_dropout_seed(11);
  const torch::Tensor first = run();
  const torch::Tensor drawn = torch::rand({4});
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(torch::rand({4}), drawn));
  torch::manual_seed(2);
  model->set_dropout_seed(11);
  EXPECT_TRUE(torch::equal(run(), first));
}

TEST_P(Dropout, ActsInTrainingOnly) {
  model->eval();
  const torch::Tensor state = model->dropout_state();
  EXPECT_TRUE(torch::equal(run(), run()));
  EXPECT_TRUE(torch::equal(model->dropout_state(), state));
  const torch::Tensor evaluated = run();
  model->train();
  EXPECT_FALSE(torch::equal(run(), evaluated));
}

TEST_P(Dropout, TheStateRestoresTheMasks) {
  run();
  const torch::Tensor state = model->dropout_state().clone();
  const torch::Tensor next = run();
  const auto other = make_causal_lm(model->config(), 5);
  other->set_dropout_state(state);
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(torch::equal(other->forward(some_tokens(2, 20)), next));
  EXPECT_THROW(other->set_dropout_state(state.narrow(0, 0, 8)), InvalidArgument);
  EXPECT_THROW(other->set_dropout_state(torch::Tensor()), InvalidArgument);
}

TEST_P(Dropout, IsDeclared) {
  EXPECT_TRUE(model->uses_dropout());
  EXPECT_FALSE(make_causal_lm(small_llama(), 1)->uses_dropout());
}

// Each part of GPT-2 that drops does so on its own: with one probability set, training differs from evaluation.
TEST(DropoutOfGpt2, EveryProbabilityCounts) {
  for (double ModelConfig::*const part :
       {&ModelConfig::embedding_dropout, &ModelConfig::attention_dropout, &ModelConfig::residual_dropout}) {
    ModelConfig config = small_gpt2();
    config.*part = 0.5;
    const auto model = make_causal_lm(config, 5);
    const torch::NoGradGuard no_grad;
    const torch::Tensor trained = model->forward(some_tokens(1, 8));
    model->eval();
    EXPECT_FALSE(torch::equal(model->forward(some_tokens(1, 8)), trained));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Dropout, testing::Values(ModelFamily::gpt2, ModelFamily::llama),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace spillway::test
