// SPDX-License-Identifier: Apache-2.0
// Names, shapes, order, blocks and initial values of parameters.
#include <algorithm>
#include <cmath>

#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

std::vector<ModelConfig> variants() {
  std::vector<ModelConfig> result{small_gpt2(), small_llama()};
  for (const char* name : {"gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "qwen3-logits", "qwen3-sliding-logits",
                           "mistral-logits", "llama-bias-logits", "gemma2", "gemma3"}) {
    result.push_back(ModelConfig::load(golden(name)));
  }
  result.push_back(small_gpt2());
  result.back().tied_head = false;
  return result;
}

TEST(Parameters, AreThoseOfParameterShapesInOrder) {
  for (const ModelConfig& config : variants()) {
    const auto model = empty_causal_lm(config);
    const auto parameters = model->named_parameters();
    const auto expected = parameter_shapes(config);
    ASSERT_EQ(parameters.size(), expected.size()) << to_string(config.family);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(parameters[i].key(), expected[i].name);
      EXPECT_EQ(parameters[i].value().sizes().vec(), expected[i].shape) << expected[i].name;
      EXPECT_TRUE(parameters[i].value().requires_grad()) << expected[i].name;
    }
    EXPECT_EQ(model->named_buffers().size(), 0U);
  }
}

TEST(Parameters, BlocksListWhatTheyRead) {
  for (const ModelConfig& config : variants()) {
    const auto model = empty_causal_lm(config);
    const auto& blocks = model->blocks();
    ASSERT_EQ(blocks.size(), static_cast<std::size_t>(config.layers) + 2);
    EXPECT_EQ(blocks.front().name, "embedding");
    EXPECT_EQ(blocks.at(1).name, "layers.0");
    EXPECT_EQ(blocks.back().name, "head");
    std::vector<std::vector<std::string>> expected(blocks.size());
    for (const ParameterShape& shape : parameter_shapes(config)) {
      expected.at(static_cast<std::size_t>(shape.block)).push_back(shape.name);
    }
    if (config.tied_head) expected.back().push_back(expected.front().front());
    const auto by_name = model->named_parameters();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      EXPECT_EQ(blocks[i].parameters, expected[i]) << blocks[i].name;
      const auto parameters = blocks[i].module->parameters();
      ASSERT_EQ(parameters.size(), blocks[i].parameters.size());
      for (std::size_t k = 0; k < parameters.size(); ++k) {
        EXPECT_TRUE(parameters[k].is_same(by_name[blocks[i].parameters[k]]));
      }
    }
  }
}

TEST(Initialisation, IsThatOfTheFamily) {
  ModelConfig config = small_gpt2();
  config.hidden = 128;
  config.head_dim = 32;
  config.layers = 8;
  config.initializer_range = 0.05;
  const auto model = make_causal_lm(config, 3);
  for (const auto& item : model->named_parameters()) {
    const torch::Tensor values = item.value().detach();
    if (item.key().ends_with(".bias")) {
      EXPECT_EQ(values.abs().max().item<double>(), 0) << item.key();
    } else if (values.dim() == 1) {
      EXPECT_TRUE(torch::equal(values, torch::ones_like(values))) << item.key();
    } else {
      const double expected = item.key().ends_with(".c_proj.weight") ? 0.05 / std::sqrt(16.0) : 0.05;
      EXPECT_NEAR(values.std().item<double>(), expected, 0.05 * expected) << item.key();
      EXPECT_NEAR(values.mean().item<double>(), 0, 0.05 * expected) << item.key();
    }
  }
}

TEST(Initialisation, LlamaDoesNotScaleItsBranches) {
  ModelConfig config = small_llama();
  config.hidden = 128;
  config.layers = 4;
  const auto weights = make_causal_lm(config, 1)->named_parameters()["model.layers.1.mlp.down_proj.weight"];
  EXPECT_NEAR(weights.std().item<double>(), 0.02, 0.001);
}

TEST(Initialisation, GemmaMultipliesByOnePlusItsNorms) {
  for (const auto& item : make_causal_lm(small_gemma(ModelFamily::gemma3), 1)->named_parameters()) {
    const bool norm = item.value().dim() == 1;
    EXPECT_EQ(item.value().abs().max().item<double>() == 0, norm) << item.key();
  }
}

TEST(Parameters, ThePaddingTokenGetsNoGradientFromTheEmbedding) {
  ModelConfig config = small_llama();
  config.padding_token = 3;
  const auto model = make_causal_lm(config, 1);
  const torch::Tensor embedding = model->named_parameters()["model.embed_tokens.weight"];
  EXPECT_EQ(embedding[3].abs().max().item<double>(), 0);
  const torch::Tensor tokens = torch::tensor({{std::int64_t{3}, std::int64_t{4}, std::int64_t{3}, std::int64_t{5}}});
  next_token_loss(model->forward(tokens), tokens, 4).backward();
  EXPECT_EQ(embedding.grad()[3].abs().max().item<double>(), 0);
  EXPECT_GT(embedding.grad()[4].abs().max().item<double>(), 0);
}

TEST(Initialisation, DependsOnItsSeedAlone) {
  torch::manual_seed(1);
  const torch::Tensor next = torch::rand({4});
  torch::manual_seed(1);
  const auto first = make_causal_lm(small_llama(), 7);
  EXPECT_TRUE(torch::equal(torch::rand({4}), next)) << "the global generator was drawn from";
  EXPECT_TRUE(equal_parameters(*first, *make_causal_lm(small_llama(), 7)));
  EXPECT_FALSE(equal_parameters(*first, *make_causal_lm(small_llama(), 8)));
}

TEST(Initialisation, SixteenBitModelsAreTheRoundedOnes) {
  const auto wide = make_causal_lm(small_gpt2(), 7)->named_parameters();
  for (const auto& item : make_causal_lm(small_gpt2(), 7, DType::bf16)->named_parameters()) {
    ASSERT_EQ(item.value().scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(torch::equal(item.value(), wide[item.key()].to(torch::kBFloat16))) << item.key();
  }
  EXPECT_THROW(make_causal_lm(small_gpt2(), 7, DType::i32), InvalidArgument);
}

}  // namespace
}  // namespace spillway::test
