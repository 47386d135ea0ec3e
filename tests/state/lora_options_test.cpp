// SPDX-License-Identifier: Apache-2.0
// Which parameters adapters add to a model, known without building it.
#include "spillway/state/lora_options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "spillway/core/error.h"
#include "state/model_config_support.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::message_of;
using test::parse_config;
using test::small;

using Shape = std::vector<std::int64_t>;

std::vector<std::string> names(const ModelConfig& config, const std::vector<std::string>& targets) {
  std::vector<std::string> out;
  for (const LoraModule& module : lora_modules(config, {.targets = targets})) out.push_back(module.name);
  return out;
}

TEST(LoraOptions, ShapesFollowTheRankAndTheLayer) {
  const auto shapes = lora_parameter_shapes(parse_config(small("llama")), {.rank = 3});
  ASSERT_EQ(shapes.size(), 3U * 2 * 2);
  EXPECT_EQ(shapes[0].name, "model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_EQ(shapes[0].shape, (Shape{3, 64}));
  EXPECT_EQ(shapes[1].name, "model.layers.0.self_attn.q_proj.lora_B.weight");
  EXPECT_EQ(shapes[1].shape, (Shape{64, 3}));
  EXPECT_EQ(shapes[3].name, "model.layers.0.self_attn.v_proj.lora_B.weight");
  EXPECT_EQ(shapes[3].shape, (Shape{32, 3})) << "two of four heads have values";
  EXPECT_EQ(shapes[0].block, 1);
  EXPECT_EQ(shapes.back().block, 3);
}

TEST(LoraOptions, Gpt2StoresItsMatricesTheOtherWayRound) {
  const auto config = parse_config(R"({"model_type":"gpt2","n_embd":8,"n_layer":1,"n_head":2,"vocab_size":16})");
  const auto shapes = lora_parameter_shapes(config, {.rank = 2, .targets = {"c_attn", "mlp.c_proj"}});
  ASSERT_EQ(shapes.size(), 4U);
  EXPECT_EQ(shapes[0].name, "transformer.h.0.attn.c_attn.lora_A.weight");
  EXPECT_EQ(shapes[0].shape, (Shape{2, 8}));
  EXPECT_EQ(shapes[1].shape, (Shape{24, 2}));
  EXPECT_EQ(shapes[2].name, "transformer.h.0.mlp.c_proj.lora_A.weight");
  EXPECT_EQ(shapes[2].shape, (Shape{2, 32}));
  EXPECT_EQ(shapes[3].shape, (Shape{8, 2}));
}

TEST(LoraOptions, TargetsAreNamesTheirEndsOrPatterns) {
  const ModelConfig config = parse_config(small("qwen3"));
  EXPECT_EQ(names(config, {}), names(config, {"v_proj", "q_proj"}));
  EXPECT_EQ(names(config, {"*.v_proj", "*.q_proj"}), names(config, {"q_proj", "v_proj", "q_proj"}));
  EXPECT_EQ(names(config, {"model.layers.1.mlp.up_proj"}), std::vector<std::string>{"model.layers.1.mlp.up_proj"});
  EXPECT_EQ(names(config, {"*.layers.?.self_attn.*"}).size(), 3U * 4);
  EXPECT_EQ(names(config, {"*"}), names(config, {"all-linear"}));
  EXPECT_EQ(names(config, {"model.*.1.*up*j"}), names(config, {"model.layers.1.mlp.up_proj"}));
  EXPECT_EQ(names(config, {"*??proj"}).size(), 3U * 7);
}

TEST(LoraOptions, AllLinearLeavesEmbeddingsNormsAndHeadOut) {
  EXPECT_EQ(names(parse_config(small("qwen3")), {"all-linear"}).size(), 3U * 7);
  EXPECT_EQ(names(ModelConfig::load(golden("gpt2")), {"all-linear"}),
            names(ModelConfig::load(golden("gpt2")), {"c_attn", "c_proj", "c_fc"}));
}

TEST(LoraOptions, ATargetThatMatchesNothingIsRefusedWithTheNearestName) {
  const ModelConfig config = parse_config(small("llama"));
  const auto refusal = [&](const std::string& target) {
    return message_of<InvalidArgument>([&] { names(config, {"q_proj", target}); });
  };
  EXPECT_TRUE(holds(refusal("qproj"), {"\"qproj\"", "nearest name is \"q_proj\"", "q_proj, k_proj, v_proj, o_proj"}));
  EXPECT_TRUE(holds(refusal("model.layers.9.mlp.up_proj"), {"nearest name is \"model.layers.0.mlp.up_proj\""}));
  for (const char* target : {"", "proj", "lm_head", "embed_tokens", "input_layernorm", "Q_PROJ", ".q_proj", "?.q_proj",
                             "*.q_proj?", "q*", "*.lm_head"}) {
    EXPECT_TRUE(holds(refusal(target), {"matches no linear layer"})) << target;
  }
}

TEST(LoraOptions, WhatIsOutOfRangeIsRefused) {
  const ModelConfig config = parse_config(small("llama"));
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  const std::pair<LoraOptions, const char*> cases[] = {
      {{.rank = 0}, "rank of 0"},
      {{.rank = -4}, "rank of -4"},
      {{.rank = (1 << 20) + 1}, "rank"},
      {{.alpha = 0}, "alpha of 0"},
      {{.alpha = nan}, "alpha of nan"},
      {{.alpha = infinity}, "alpha of inf"},
      {{.dropout = 1}, "dropout of 1"},
      {{.dropout = -0.1}, "dropout"},
      {{.dropout = nan}, "dropout of nan"},
      {{.targets = std::vector<std::string>(10'001, "q_proj")}, "10001 LoRA targets"},
  };
  for (const auto& [options, part] : cases) {
    EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { lora_parameter_shapes(config, options); }), {part})) << part;
  }
}

TEST(LoraOptions, ScalingIsThatOfThePapers) {
  EXPECT_EQ((LoraOptions{.rank = 16, .alpha = 32}).scaling(), 2);
  EXPECT_EQ((LoraOptions{.rank = 16, .alpha = 32, .rank_stabilized = true}).scaling(), 8);
}

}  // namespace
}  // namespace spillway
