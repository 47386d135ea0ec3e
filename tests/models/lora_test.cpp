// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters: what they add to a model, what trains, what merging leaves.
#include "spillway/models/lora.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

torch::Tensor logits_of(CausalLM& model) {
  const torch::NoGradGuard no_grad;
  return model.forward(some_tokens(2, 20));
}

// Adapters that do something: B is zero after add_lora.
void draw_b(CausalLM& model, std::uint64_t seed = 9) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  for (auto& item : model.named_parameters()) {
    if (item.key().ends_with(".lora_B.weight")) item.value().copy_(torch::randn(item.value().sizes()) * 0.1);
  }
}

std::shared_ptr<CausalLM> adapted(const ModelConfig& config, const LoraOptions& options, DType dtype = DType::f32) {
  const auto model = make_causal_lm(config, 5, dtype);
  perturb(*model);
  add_lora(*model, options, 3);
  draw_b(*model);
  return model;
}

std::vector<std::string> names_of(const std::vector<ParameterShape>& shapes) {
  std::vector<std::string> names;
  for (const ParameterShape& shape : shapes) names.push_back(shape.name);
  return names;
}

class Lora : public testing::TestWithParam<ModelFamily> {
 protected:
  const ModelConfig config = small_model(GetParam());
  const LoraOptions all{.rank = 3, .alpha = 6, .targets = {"all-linear"}};
};
INSTANTIATE_TEST_SUITE_P(Families, Lora, testing::ValuesIn(kAllFamilies),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(Lora, ParametersAreThoseOfTheTwoListsTheFirstFrozenTheSecondTrained) {
  for (const LoraOptions& options : {LoraOptions{}, all, LoraOptions{.rank = 1, .targets = {"*.1.*"}}}) {
    const auto model = make_causal_lm(config, 5);
    add_lora(*model, options, 3);
    std::vector<std::string> frozen, trained;
    for (const auto& item : model->named_parameters()) {
      (item.value().requires_grad() ? trained : frozen).push_back(item.key());
    }
    EXPECT_EQ(frozen, names_of(parameter_shapes(config)));
    const auto expected = lora_parameter_shapes(config, options);
    EXPECT_EQ(trained, names_of(expected));
    for (const ParameterShape& shape : expected) {
      EXPECT_EQ(model->named_parameters()[shape.name].sizes().vec(), shape.shape) << shape.name;
    }
    EXPECT_EQ(model->lora(), options);
  }
}

TEST_P(Lora, BlocksListTheirAdapters) {
  const auto model = make_causal_lm(config, 5);
  const std::vector<Block> before = model->blocks();
  add_lora(*model, all, 3);
  const auto expected = lora_parameter_shapes(config, all);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Block& block = model->blocks().at(i);
    EXPECT_EQ(block.module, before[i].module);
    EXPECT_EQ(block.parameters.size(), block.module->parameters().size());
    std::vector<std::string> adapters, wanted;
    for (const std::string& name : block.parameters) {
      if (name.find(".lora_") != std::string::npos) adapters.push_back(name);
    }
    for (const ParameterShape& shape : expected) {
      if (shape.block == static_cast<std::int64_t>(i)) wanted.push_back(shape.name);
    }
    EXPECT_EQ(adapters, wanted) << block.name;
    EXPECT_EQ(block.parameters.size() - adapters.size(), before[i].parameters.size());
  }
}

TEST_P(Lora, NewAdaptersLeaveTheLogitsAsTheyWere) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const auto model = make_causal_lm(config, 5, dtype);
    perturb(*model);
    model->eval();
    const torch::Tensor before = logits_of(*model);
    add_lora(*model, all, 3);
    EXPECT_TRUE(torch::equal(logits_of(*model), before));
    draw_b(*model);
    EXPECT_FALSE(torch::equal(logits_of(*model), before));
    EXPECT_EQ(logits_of(*model).scalar_type(), before.scalar_type());
    remove_lora(*model);
    EXPECT_TRUE(torch::equal(logits_of(*model), before));
    EXPECT_FALSE(model->lora().has_value());
  }
}

TEST_P(Lora, GradientsAreThoseOfTheMergedWeightsAndOfNothingElse) {
  const auto model = adapted(config, all), merged = adapted(config, all);
  merge_lora(*merged);
  for (torch::Tensor& parameter : merged->parameters()) parameter.set_requires_grad(true);
  const torch::Tensor tokens = some_tokens(2, 20);
  for (const auto& each : {model, merged}) next_token_loss(each->forward(tokens), tokens, tokens.numel()).backward();
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(item.value().grad().defined(), item.value().requires_grad()) << item.key();
  }
  for (const LoraModule& module : lora_modules(config, all)) {
    const torch::Tensor a = model->named_parameters()[module.name + ".lora_A.weight"];
    const torch::Tensor b = model->named_parameters()[module.name + ".lora_B.weight"];
    torch::Tensor whole = merged->named_parameters()[module.name + ".weight"].grad();
    if (GetParam() == ModelFamily::gpt2) whole = whole.t();
    const double scale = all.scaling() * std::max(whole.abs().max().item<double>(), 1e-3);
    EXPECT_LT(largest_difference(a.grad(), torch::mm(b.detach().t(), whole) * all.scaling()), 1e-4 * scale);
    EXPECT_LT(largest_difference(b.grad(), torch::mm(whole, a.detach().t()) * all.scaling()), 1e-4 * scale);
    EXPECT_GT(a.grad().abs().max().item<double>(), 0) << module.name;
  }
}

TEST_P(Lora, MergingKeepsWhatTheModelComputes) {
  for (const bool rank_stabilized : {false, true}) {
    LoraOptions options = all;
    options.rank_stabilized = rank_stabilized;
    const auto model = adapted(config, options);
    model->eval();
    const torch::Tensor before = logits_of(*model);
    merge_lora(*model);
    EXPECT_LT(largest_difference(logits_of(*model), before), 1e-5);
    EXPECT_EQ(model->named_parameters().keys(), names_of(parameter_shapes(config)));
    EXPECT_EQ(model->blocks().at(1).parameters, empty_causal_lm(config)->blocks().at(1).parameters);
    EXPECT_FALSE(model->parameters().front().requires_grad()) << "parameters stay frozen";
    add_lora(*model, options, 4);  // as good as new
  }
}

TEST_P(Lora, MergedWeightsAreComputedInFp32AndRoundedOnce) {
  const auto model = adapted(config, all, DType::bf16);
  const auto before = model->named_parameters();
  std::map<std::string, torch::Tensor> expected;
  for (const LoraModule& module : lora_modules(config, all)) {
    const auto wide = [&](const char* end) { return before[module.name + end].detach().to(torch::kFloat); };
    torch::Tensor update = torch::mm(wide(".lora_B.weight"), wide(".lora_A.weight")) * all.scaling();
    if (GetParam() == ModelFamily::gpt2) update = update.t();
    expected[module.name + ".weight"] = (wide(".weight") + update).to(torch::kBFloat16);
  }
  merge_lora(*model);
  for (const auto& [name, values] : expected) {
    EXPECT_TRUE(torch::equal(model->named_parameters()[name], values)) << name;
  }
}

TEST_P(Lora, AMergingSaveWritesTheMergedModelAndLeavesTheModel) {
  const auto model = adapted(config, all), merged = adapted(config, all), same = adapted(config, all);
  merge_lora(*merged);
  const TempFolder folder;
  save_causal_lm(*model, folder.path(), {.merge_lora = true});
  EXPECT_TRUE(equal_parameters(*load_causal_lm(folder.path()), *merged));
  EXPECT_TRUE(equal_parameters(*model, *same));
  EXPECT_EQ(model->lora(), all);
  const TempFolder plain;
  save_causal_lm(*merged, plain.path(), {.merge_lora = true});  // nothing left to merge
  EXPECT_TRUE(equal_parameters(*load_causal_lm(plain.path()), *merged));
}

TEST_P(Lora, AMergingSaveTakesBaseAndAdaptersFromElsewhere) {
  const auto exact = adapted(config, all), model = adapted(config, all, DType::bf16);
  const TempFolder folder;
  save_causal_lm(*model, folder.path(),
                 {.dtype = DType::f32,
                  .weights = [&](const auto& name) { return exact->named_parameters()[name]; },
                  .merge_lora = true});
  merge_lora(*exact);
  EXPECT_TRUE(equal_parameters(*load_causal_lm(folder.path()), *exact));
}

TEST_P(Lora, GeneratesWhatTheMergedModelGenerates) {
  const auto model = adapted(config, all), merged = adapted(config, all);
  merge_lora(*merged);
  EXPECT_EQ(generate_greedy(*model, {1, 2, 3}, 12), generate_greedy(*merged, {1, 2, 3}, 12));
}

TEST_P(Lora, DropoutOfAdaptersDrawsFromTheModelsGeneratorInTrainingOnly) {
  LoraOptions options = all;
  options.dropout = 0.3;
  const auto model = adapted(config, options);
  EXPECT_TRUE(model->uses_dropout());
  model->eval();
  const torch::Tensor evaluated = logits_of(*model);
  EXPECT_TRUE(torch::equal(logits_of(*adapted(config, all)), evaluated));
  model->train();
  model->set_dropout_seed(7);
  const torch::Tensor state = model->dropout_state();
  const torch::Tensor first = logits_of(*model), second = logits_of(*model);
  EXPECT_FALSE(torch::equal(first, evaluated));
  EXPECT_FALSE(torch::equal(first, second));
  model->set_dropout_state(state);
  EXPECT_TRUE(torch::equal(logits_of(*model), first));
  remove_lora(*model);
  EXPECT_FALSE(model->uses_dropout());
}

TEST(LoraDropout, KeepsTheMean) {
  const auto model = adapted(small_llama(), {.rank = 4, .alpha = 0.01, .dropout = 0.5});
  model->eval();
  const torch::Tensor expected = logits_of(*model).to(torch::kDouble);
  const auto plain = adapted(small_llama(), {});
  remove_lora(*plain);
  const double effect = largest_difference(expected, logits_of(*plain));
  model->train();
  torch::Tensor sum = torch::zeros_like(expected);
  constexpr int kRuns = 400;
  for (int i = 0; i < kRuns; ++i) sum += logits_of(*model).to(torch::kDouble);
  EXPECT_LT(largest_difference(sum / kRuns, expected), 0.3 * effect);
}

TEST(LoraInitialisation, IsUniformFromAGeneratorOfItsOwn) {
  ModelConfig config = small_llama();
  config.hidden = 256;
  config.heads = 32;
  config.kv_heads = 32;
  torch::manual_seed(1);
  const torch::Tensor next = torch::rand({4});
  torch::manual_seed(1);
  const auto model = empty_causal_lm(config), same = empty_causal_lm(config), other = empty_causal_lm(config);
  const auto rounded = empty_causal_lm(config, DType::bf16);
  const LoraOptions options{.rank = 64};
  add_lora(*model, options, 3);
  add_lora(*same, options, 3);
  add_lora(*rounded, options, 3);
  add_lora(*other, options, 4);
  EXPECT_TRUE(torch::equal(torch::rand({4}), next)) << "the global generator was drawn from";
  for (const ParameterShape& shape : lora_parameter_shapes(config, options)) {
    const torch::Tensor values = model->named_parameters()[shape.name].detach();
    EXPECT_TRUE(torch::equal(values, same->named_parameters()[shape.name]));
    EXPECT_TRUE(torch::equal(values.to(torch::kBFloat16), rounded->named_parameters()[shape.name]));
    if (shape.name.ends_with("B.weight")) {
      EXPECT_EQ(values.abs().max().item<double>(), 0) << shape.name;
      continue;
    }
    EXPECT_FALSE(torch::equal(values, other->named_parameters()[shape.name]));
    const double bound = 1 / std::sqrt(256.0);
    EXPECT_LE(values.abs().max().item<double>(), bound);
    EXPECT_NEAR(values.std().item<double>(), bound / std::sqrt(3.0), 0.02 * bound);
    EXPECT_NEAR(values.mean().item<double>(), 0, 0.02 * bound);
  }
}

TEST(LoraRefusals, LeaveTheModelAsItIs) {
  const auto model = make_causal_lm(small_llama(), 5);
  EXPECT_NE(message_of([&] { add_lora(*model, {.targets = {"qproj"}}, 1); }).find("\"q_proj\""), std::string::npos);
  EXPECT_NE(message_of([&] { add_lora(*model, {.rank = 0}, 1); }).find("rank of 0"), std::string::npos);
  EXPECT_NE(message_of([&] { merge_lora(*model); }).find("no LoRA adapters"), std::string::npos);
  EXPECT_NE(message_of([&] { remove_lora(*model); }).find("no LoRA adapters"), std::string::npos);
  EXPECT_TRUE(equal_parameters(*model, *make_causal_lm(small_llama(), 5)));
  EXPECT_TRUE(model->parameters().front().requires_grad());
  add_lora(*model, {}, 1);
  EXPECT_NE(message_of([&] { add_lora(*model, {}, 1); }).find("adapters already"), std::string::npos);
}

TEST(LoraRefusals, AnAdaptedModelIsSavedOnlyWhereItIsSaidHow) {
  const auto model = adapted(small_llama(), {});
  const TempFolder folder;
  const std::string message = message_of([&] { save_causal_lm(*model, folder.path()); });
  EXPECT_NE(message.find("save_lora"), std::string::npos) << message;
  EXPECT_NE(message.find("merge_lora"), std::string::npos) << message;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(LoraRefusals, NothingChangesWhileBlocksAreBound) {
  const auto model = make_causal_lm(small_llama(), 5);
  const auto call = [](torch::nn::Module&, const BlockForward& forward, const auto& inputs) { return forward(inputs); };
  model->set_block_call(call);
  EXPECT_THROW(add_lora(*model, {}, 1), StateError);
  model->set_block_call({});
  add_lora(*model, {}, 1);
  model->set_block_call(call);
  EXPECT_THROW(merge_lora(*model), StateError);
  EXPECT_THROW(remove_lora(*model), StateError);
  EXPECT_TRUE(model->lora().has_value());
}

TEST(LoraRefusals, ReleasedMemoryIsNotMerged) {
  const auto model = adapted(small_llama(), {});
  const torch::Tensor before = model->named_parameters()["model.layers.0.self_attn.q_proj.weight"].detach().clone();
  auto parameter = model->named_parameters()["model.layers.1.self_attn.v_proj.lora_A.weight"];
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, torch::kCPU));
  EXPECT_THROW(merge_lora(*model), StateError);
  EXPECT_TRUE(torch::equal(model->named_parameters()["model.layers.0.self_attn.q_proj.weight"], before));
}

}  // namespace
}  // namespace spillway::test
