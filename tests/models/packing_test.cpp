// SPDX-License-Identifier: Apache-2.0
// Several documents in a row: each is computed as if it stood alone.
#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

ModelConfig variant(ModelFamily family) {
  ModelConfig config = small_model(family);
  if (family == ModelFamily::qwen3) config.layer_slides = {true, false};
  return config;
}

torch::Tensor repeated(const std::vector<std::pair<std::int64_t, std::int64_t>>& runs) {
  std::vector<torch::Tensor> parts;
  for (const auto& [number, count] : runs) parts.push_back(torch::full({1, count}, number, torch::kLong));
  return torch::cat(parts, 1);
}

torch::Tensor summed_loss(CausalLM& model, const torch::Tensor& tokens, const torch::Tensor& documents = {}) {
  torch::Tensor targets = tokens.roll(-1, 1);
  const torch::Tensor own = documents.defined() ? documents : torch::zeros_like(tokens);
  targets = targets.masked_fill(own.ne(own.roll(-1, 1)).logical_or(own.lt(0)), kIgnoredTarget);
  targets.select(1, -1).fill_(kIgnoredTarget);
  return next_token_loss_sum(model.forward(tokens, documents), targets);
}

std::vector<torch::Tensor> gradients(CausalLM& model, const std::vector<torch::Tensor>& losses) {
  for (torch::Tensor& parameter : model.parameters()) parameter.mutable_grad().reset();
  for (const torch::Tensor& loss : losses) loss.backward();
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& parameter : model.parameters()) result.push_back(parameter.grad().clone());
  return result;
}

class Packing : public testing::TestWithParam<ModelFamily> {
 protected:
  // Documents of 9, 12 and 1 tokens, then padding.
  const torch::Tensor tokens = some_tokens(1, 26);
  const torch::Tensor documents = repeated({{0, 9}, {1, 12}, {2, 1}, {-1, 4}});
  const std::vector<std::pair<std::int64_t, std::int64_t>> spans{{0, 9}, {9, 12}, {21, 1}};
};
INSTANTIATE_TEST_SUITE_P(Families, Packing, testing::ValuesIn(kAllFamilies),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(Packing, EachDocumentHasTheLogitsItHasAlone) {
  const torch::NoGradGuard no_grad;
  for (const auto& [type, tolerance] : {std::pair(DType::f32, 1e-5), std::pair(DType::bf16, 0.1)}) {
    const auto model = perturbed(variant(GetParam()), type);
    const torch::Tensor packed = model->forward(tokens, documents);
    EXPECT_TRUE(packed.isfinite().all().item<bool>());
    for (const auto& [first, count] : spans) {
      const torch::Tensor alone = model->forward(tokens.narrow(1, first, count));
      EXPECT_LT(largest_difference(packed.narrow(1, first, count), alone), tolerance) << first;
    }
    EXPECT_GT(largest_difference(packed.narrow(1, 9, 12), model->forward(tokens).narrow(1, 9, 12)), 1e-2);
  }
}

TEST_P(Packing, RowsMayBePackedDifferently) {
  const torch::NoGradGuard no_grad;
  const auto model = perturbed(variant(GetParam()));
  const torch::Tensor both = model->forward(tokens.repeat({2, 1}), torch::cat({documents, repeated({{5, 26}})}));
  EXPECT_LT(largest_difference(both[0], model->forward(tokens, documents)[0]), 1e-5);
  EXPECT_LT(largest_difference(both[1], model->forward(tokens)[0]), 1e-5);
}

TEST_P(Packing, GradientsAreTheSumOfTheDocuments) {
  const auto model = perturbed(variant(GetParam()));
  const auto packed = gradients(*model, {summed_loss(*model, tokens, documents)});
  std::vector<torch::Tensor> losses;
  for (const auto& [first, count] : spans) losses.push_back(summed_loss(*model, tokens.narrow(1, first, count)));
  const auto alone = gradients(*model, losses);
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const double size = alone[i].norm().item<double>();
    EXPECT_LT((packed[i] - alone[i]).norm().item<double>(), 1e-5 * size + 1e-6) << i;
  }
}

TEST_P(Packing, PaddingChangesNothing) {
  const auto model = perturbed(variant(GetParam()));
  const torch::Tensor other = tokens.clone();
  other.narrow(1, 22, 4).fill_(63);
  const torch::Tensor before = model->forward(tokens, documents), after = model->forward(other, documents);
  EXPECT_TRUE(torch::equal(before.narrow(1, 0, 22), after.narrow(1, 0, 22)));
  // Padding may stand anywhere, before a document too.
  const torch::Tensor padded_first = model->forward(tokens, repeated({{-1, 9}, {1, 12}, {-1, 5}}));
  EXPECT_LT(largest_difference(padded_first.narrow(1, 9, 12), before.narrow(1, 9, 12)), 1e-5);
}

// All that depends on the batch is among a block's inputs: computed again after another batch, it is the same.
TEST_P(Packing, BlocksCanBeComputedAgain) {
  const auto model = perturbed(variant(GetParam()));
  std::vector<std::function<torch::Tensor()>> again;
  std::vector<torch::Tensor> outputs;
  model->set_block_call([&](torch::nn::Module&, const BlockForward& forward, const auto& inputs) {
    for (const torch::Tensor& input : inputs) EXPECT_TRUE(input.defined());
    auto result = forward(inputs);
    again.emplace_back([forward, inputs = std::vector<torch::Tensor>(inputs)] { return forward(inputs).at(0); });
    outputs.push_back(result.at(0));
    return result;
  });
  model->forward(tokens, documents);
  model->set_block_call({});
  model->forward(some_tokens(3, 7), repeated({{0, 4}, {1, 3}}).repeat({3, 1}));
  ASSERT_EQ(outputs.size(), model->blocks().size());
  for (std::size_t i = 0; i < outputs.size(); ++i) EXPECT_TRUE(torch::equal(again[i](), outputs[i])) << i;
}

TEST_P(Packing, NeedsNoMemoryOnModelsOfShapesAlone) {
  const auto model = meta_causal_lm(variant(GetParam()), DType::bf16);
  const torch::Tensor meta = torch::empty({2, 12}, torch::TensorOptions().dtype(torch::kLong).device(torch::kMeta));
  next_token_loss(model->forward(meta), meta, 24).backward();
  for (torch::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
  next_token_loss(model->forward(meta, meta), meta, 24).backward();
  for (const torch::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().is_meta());
}

TEST(PackingArguments, AreOfTheTokensShapeAndType) {
  const auto model = perturbed(small_llama());
  EXPECT_THROW(model->forward(some_tokens(1, 4), torch::zeros({1, 5}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(model->forward(some_tokens(1, 4), torch::zeros({4}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(model->forward(some_tokens(1, 4), torch::zeros({1, 4}, torch::kInt)), InvalidArgument);
}

}  // namespace
}  // namespace spillway::test
