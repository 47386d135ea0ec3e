// SPDX-License-Identifier: Apache-2.0
// Text by text: what a cache of keys and values gives is what the whole row gives.
#include "spillway/models/generate.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "models/model_support.h"
#include "spillway/core/error.h"
#include "spillway/models/lora.h"

namespace spillway::test {
namespace {

using Text = std::vector<std::int64_t>;

Text some_text(std::int64_t length) {
  const torch::Tensor tokens = some_tokens(1, length)[0];
  return {tokens.const_data_ptr<std::int64_t>(), tokens.const_data_ptr<std::int64_t>() + length};
}

// What is documented, without a cache: the row that the next token is computed from starts at `first`.
Text without_cache(CausalLM& model, Text text, std::int64_t count) {
  const torch::NoGradGuard no_grad;
  model.eval();
  const std::int64_t most = model.config().max_position;
  std::int64_t first = std::max<std::int64_t>(0, static_cast<std::int64_t>(text.size()) - most);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto length = static_cast<std::int64_t>(text.size());
    if (length - first > most) first = length - most / 2;
    const torch::Tensor row = torch::tensor(Text(text.begin() + first, text.end())).unsqueeze(0);
    text.push_back(model.forward(row)[0][-1].argmax().item<std::int64_t>());
  }
  return text;
}

// The largest difference between a decoder's logits and those of the whole rows, from a beginning on to the end.
double cache_error(CausalLM& model, const torch::Tensor& tokens, std::int64_t beginning) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor whole = (model.eval(), model.forward(tokens));
  Decoder decoder(model, tokens.size(0), tokens.size(1));
  double error = largest_difference(decoder.start(tokens.narrow(1, 0, beginning)), whole.select(1, beginning - 1));
  for (std::int64_t i = beginning; i < tokens.size(1); ++i) {
    error = std::max(error, largest_difference(decoder.next(tokens.narrow(1, i, 1)), whole.select(1, i)));
    EXPECT_EQ(decoder.length(), i + 1);
  }
  return error;
}

ModelConfig variant(ModelFamily family, bool tied) {
  ModelConfig config = small_model(family);
  config.tied_head = tied;
  return config;
}

class Cache : public testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, Cache, testing::ValuesIn(kAllFamilies),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(Cache, GivesTheLogitsOfTheWholeRow) {
  for (const bool tied : {false, true}) {
    for (const auto& [type, tolerance] : {std::pair(DType::f32, 1e-5), std::pair(DType::bf16, 0.1)}) {
      const auto model = perturbed(variant(GetParam(), tied), type);
      for (const std::int64_t beginning : {1, 5, 6, 7, 13}) {
        EXPECT_LT(cache_error(*model, some_tokens(2, 20), beginning), tolerance) << beginning << to_string(type);
      }
    }
  }
}

TEST_P(Cache, GivesTheTokensOfTheWholeRow) {
  for (const bool tied : {false, true}) {
    const auto model = perturbed(variant(GetParam(), tied));
    for (const std::int64_t beginning : {1, 2, 9}) {
      const Text text = some_text(beginning);
      EXPECT_EQ(generate_greedy(*model, text, 15), without_cache(*model, text, 15)) << beginning;
    }
  }
}

TEST_P(Cache, WorksWithAdapters) {
  const auto model = perturbed(variant(GetParam(), true));
  add_lora(*model, {.rank = 3, .alpha = 6, .dropout = 0.5, .targets = {"all-linear"}}, 3);
  perturb(*model);  // B is zero before
  EXPECT_LT(cache_error(*model, some_tokens(1, 20), 4), 1e-5);
  EXPECT_EQ(generate_greedy(*model, some_text(4), 12), without_cache(*model, some_text(4), 12));
}

TEST_P(Cache, GoesOnFromTheLastHalfWhenThePositionsAreUsedUp) {
  const auto model = perturbed(variant(GetParam(), true));
  for (const std::int64_t beginning : {3, 31, 32, 40}) {
    const Text text = some_text(beginning);
    EXPECT_EQ(generate_greedy(*model, text, 60), without_cache(*model, text, 60)) << beginning;
  }
}

TEST_P(Cache, RunsEveryBlockThroughTheBoundCallOnOnePosition) {
  const auto model = perturbed(variant(GetParam(), false));
  const Text expected = generate_greedy(*model, some_text(5), 4);
  std::vector<torch::nn::Module*> seen, blocks;
  std::vector<std::int64_t> lengths;
  for (const Block& block : model->blocks()) blocks.push_back(block.module);
  model->set_block_call([&](torch::nn::Module& block, const BlockForward& forward, const auto& inputs) {
    seen.push_back(&block);
    if (seen.size() % blocks.size() == 2) lengths.push_back(inputs.at(0).size(1));
    return forward(inputs);
  });
  EXPECT_EQ(generate_greedy(*model, some_text(5), 4), expected);
  ASSERT_EQ(seen.size(), 4 * blocks.size());
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], blocks[i % blocks.size()]);
  EXPECT_EQ(lengths, (std::vector<std::int64_t>{5, 1, 1, 1}));
}

class GoldenGeneration : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, GoldenGeneration,
                         testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "qwen3-logits",
                                         "qwen3-sliding-logits", "mistral-logits", "llama-bias-logits", "gemma2",
                                         "gemma3"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(GoldenGeneration, IsTheLikeliestTokenOfTheWholeRow) {
  const auto model = load_causal_lm(golden(GetParam()));
  Text text = some_text(7);
  EXPECT_EQ(generate_greedy(*model, text, 24), without_cache(*model, text, 24));
}

// A model without layers to speak of: the next token's logits are chosen by the test.
std::shared_ptr<CausalLM> with_logits(const std::vector<float>& logits) {
  ModelConfig config = small_gpt2();
  config.vocabulary = static_cast<std::int64_t>(logits.size());
  config.tied_head = false;
  config.layers = 1;
  config.max_position = 1024;
  auto model = make_causal_lm(config, 1);
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) item.value().zero_();
  auto parameters = model->named_parameters();
  parameters["transformer.ln_f.bias"].select(0, 0).fill_(1);
  parameters["lm_head.weight"].select(1, 0).copy_(torch::tensor(logits));
  return model;
}

std::vector<double> frequencies(CausalLM& model, GenerateOptions options) {
  std::vector<double> result(static_cast<std::size_t>(model.config().vocabulary));
  options.max_new_tokens = 1000;
  const Text text = generate(model, {0}, options);
  for (std::size_t i = 1; i < text.size(); ++i) result[static_cast<std::size_t>(text[i])] += 1;
  for (double& count : result) count /= 1000;
  return result;
}

TEST(Drawing, FollowsTheSoftmaxAtEachTemperature) {
  const std::vector<float> logits{0.0F, std::log(2.0F), std::log(5.0F), -50.0F};
  const auto model = with_logits(logits);
  for (const double temperature : {0.5, 1.0, 2.0}) {
    const auto drawn = frequencies(*model, {.temperature = temperature, .seed = 4});
    const torch::Tensor expected = torch::softmax(torch::tensor(logits) / temperature, 0);
    for (std::int64_t i = 0; i < 4; ++i) {  // four standard deviations
      EXPECT_NEAR(drawn[static_cast<std::size_t>(i)], expected[i].item<double>(), 0.063) << i << " at " << temperature;
    }
  }
}

TEST(Drawing, IsCutToTheLikeliest) {
  const auto model = with_logits({std::log(1.0F), std::log(6.0F), std::log(2.0F), std::log(1.0F)});
  const auto two = frequencies(*model, {.temperature = 1, .top_k = 2});
  EXPECT_NEAR(two[1], 0.75, 0.063);
  EXPECT_NEAR(two[2], 0.25, 0.063);
  EXPECT_EQ(two[0] + two[3], 0);
  const auto most = frequencies(*model, {.temperature = 1, .top_p = 0.7});
  EXPECT_NEAR(most[1], 0.75, 0.063) << "0.6 is not enough: the next is added";
  EXPECT_EQ(most[0] + most[3], 0);
  EXPECT_EQ(frequencies(*model, {.temperature = 1, .top_p = 0.5})[1], 1);
  EXPECT_EQ(frequencies(*model, {.temperature = 1, .top_k = 1})[1], 1);
  const auto all = frequencies(*model, {.temperature = 1, .top_k = 100});
  EXPECT_NEAR(all[0], 0.1, 0.04);
  EXPECT_NEAR(all[3], 0.1, 0.04);
}

TEST(Drawing, OneSeedGivesOneText) {
  const auto model = perturbed(small_llama());
  GenerateOptions options{.max_new_tokens = 40, .temperature = 1.5, .top_p = 0.95, .seed = 7};
  const Text text = generate(*model, {1, 2}, options);
  torch::manual_seed(99);
  EXPECT_EQ(generate(*model, {1, 2}, options), text);
  std::set<Text> others{text};
  for (options.seed = 8; options.seed < 12; ++options.seed) others.insert(generate(*model, {1, 2}, options));
  EXPECT_EQ(others.size(), 5U);
}

TEST(Drawing, StopsAtTheStopToken) {
  const auto model = perturbed(small_llama());
  const GenerateOptions options{.max_new_tokens = 40, .temperature = 1, .seed = 7};
  const Text text = generate(*model, {1, 2}, options);
  GenerateOptions stopping = options;
  stopping.stop_token = text[10];
  const Text stopped = generate(*model, {1, 2}, stopping);
  ASSERT_LE(stopped.size(), 11U);
  EXPECT_EQ(stopped.back(), text[10]);
  EXPECT_TRUE(std::equal(stopped.begin(), stopped.end(), text.begin()));
}

TEST(Generate, RefusesOptionsOutOfRange) {
  const auto model = perturbed(small_llama());
  const auto refused = [&](GenerateOptions options) {
    try {
      generate(*model, {1}, options);
      return false;
    } catch (const InvalidArgument&) {
      return true;
    }
  };
  EXPECT_TRUE(refused({.max_new_tokens = -1}));
  EXPECT_TRUE(refused({.temperature = -0.5}));
  EXPECT_TRUE(refused({.temperature = std::nan("")}));
  EXPECT_TRUE(refused({.top_p = 0}));
  EXPECT_TRUE(refused({.top_p = 1.5}));
  EXPECT_TRUE(refused({.top_k = -1}));
  EXPECT_EQ(generate(*model, {1, 2}, {.max_new_tokens = 0}), (Text{1, 2}));
}

TEST(Generate, RefusesToDrawFromWhatIsNoNumber) {
  const auto model = with_logits({0.0F, std::nanf(""), 1.0F});
  EXPECT_THROW(generate(*model, {0}, {.max_new_tokens = 1, .temperature = 1}), StateError);
}

TEST(DecoderClass, RefusesWhatDoesNotFit) {
  const auto model = perturbed(small_llama());
  EXPECT_THROW(Decoder(*model, 0, 4), InvalidArgument);
  EXPECT_THROW(Decoder(*model, 1, 33), InvalidArgument);
  EXPECT_THROW(Decoder(*model, 1, 0), InvalidArgument);
  Decoder decoder(*model, 2, 4);
  EXPECT_THROW(decoder.next(some_tokens(2, 1)), StateError);
  EXPECT_THROW(decoder.start(some_tokens(1, 3)), InvalidArgument);
  EXPECT_THROW(decoder.start(some_tokens(2, 5)), InvalidArgument);
  EXPECT_THROW(decoder.pretend(2), InvalidArgument);
  const torch::Tensor first = decoder.start(some_tokens(2, 3));
  EXPECT_EQ(first.sizes(), (std::vector<std::int64_t>{2, 64}));
  EXPECT_THROW(decoder.next(some_tokens(2, 2)), InvalidArgument);
  decoder.next(some_tokens(2, 1));
  EXPECT_THROW(decoder.next(some_tokens(2, 1)), StateError);
  EXPECT_TRUE(torch::equal(decoder.start(some_tokens(2, 3)), first)) << "what was read before is forgotten";
}

}  // namespace
}  // namespace spillway::test
