// SPDX-License-Identifier: Apache-2.0
// What PyTorch and transformers computed with the same weights: logits, and twenty steps of training.
#include <algorithm>

#include "models/model_support.h"

namespace spillway::test {
namespace {

std::string test_name(std::string folder) {
  std::replace(folder.begin(), folder.end(), '-', '_');
  return folder;
}

struct Rows {
  torch::Tensor inputs, targets;  // [micro-batches, rows, length] int64
};

Rows read_rows(const std::string& name, std::int64_t batch) {
  const SafetensorsReader reader(golden(name) / "rows.safetensors");
  const torch::Tensor tokens = read_tensor(reader, "tokens").to(torch::kLong);
  const torch::Tensor labels = reader.contains("labels") ? read_tensor(reader, "labels").to(torch::kLong) : tokens;
  const std::int64_t length = tokens.size(1) - 1;
  return {tokens.narrow(1, 0, length).contiguous().view({-1, batch, length}),
          labels.narrow(1, 1, length).contiguous().view({-1, batch, length})};
}

class Golden : public testing::TestWithParam<std::string> {};
class GoldenLogits : public testing::TestWithParam<std::string> {};
class GoldenTraining : public testing::TestWithParam<std::string> {};

TEST_P(Golden, LogitsOfTheFirstRows) {
  const auto model = load_causal_lm(golden(GetParam()));
  model->eval();
  const torch::NoGradGuard no_grad;
  const torch::Tensor expected = read_tensor(SafetensorsReader(golden(GetParam()) / "reference.safetensors"), "logits");
  const torch::Tensor logits = model->forward(read_rows(GetParam(), expected.size(0)).inputs[0]);
  ASSERT_EQ(logits.sizes(), expected.sizes());
  EXPECT_LT(largest_difference(logits, expected), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "gemma2", "gemma3"),
                         [](const auto& info) { return test_name(info.param); });

TEST_P(GoldenLogits, OfTheOtherVariants) {
  const auto model = load_causal_lm(golden(GetParam()));
  model->eval();
  const torch::NoGradGuard no_grad;
  const SafetensorsReader reader(golden(GetParam()) / "logits.safetensors");
  const torch::Tensor logits = model->forward(read_tensor(reader, "tokens").to(torch::kLong));
  EXPECT_LT(largest_difference(logits, read_tensor(reader, "logits")), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenLogits,
                         testing::Values("qwen3-logits", "qwen3-sliding-logits", "mistral-logits", "llama-bias-logits"),
                         [](const auto& info) { return test_name(info.param); });

// PyTorch's AdamW with decay on matrices only, and its clipping: nothing of Spillway but the model and its loss.
struct PlainTraining {
  CausalLM& model;
  torch::optim::AdamW optimizer;

  static std::vector<torch::optim::OptimizerParamGroup> groups(CausalLM& model, const nlohmann::json& settings) {
    std::vector<torch::Tensor> matrices, vectors;
    for (const torch::Tensor& parameter : model.parameters()) {
      (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
    }
    const auto options = [&](double decay) {
      const auto betas = settings.at("betas").get<std::vector<double>>();
      return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(settings.at("lr").get<double>())
                                                              .betas({betas.at(0), betas.at(1)})
                                                              .eps(settings.at("eps").get<double>())
                                                              .weight_decay(decay));
    };
    std::vector<torch::optim::OptimizerParamGroup> result;
    result.emplace_back(matrices, options(settings.at("weight_decay").get<double>()));
    result.emplace_back(vectors, options(0));
    return result;
  }

  // The loss of the step, from `count` micro-batches starting at `first`.
  double step(const Rows& rows, std::int64_t first, std::int64_t count) {
    const std::int64_t valid = count_targets(rows.targets.narrow(0, first, count));
    double total = 0;
    for (std::int64_t i = first; i < first + count; ++i) {
      const torch::Tensor loss = next_token_loss(model.forward(rows.inputs[i]), rows.targets[i], valid);
      loss.backward();
      total += loss.item<double>();
    }
    norm = torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    return total;
  }

  double norm = 0;
};

TEST_P(GoldenTraining, FollowsThePublishedCurve) {
  const auto reference = nlohmann::json::parse(read_text(golden(GetParam()) / "reference.json"));
  const auto model = load_causal_lm(golden(GetParam()));
  const auto rows = read_rows(GetParam(), reference.at("batch").get<std::int64_t>());
  const auto accumulation = reference.at("accumulation").get<std::int64_t>();
  PlainTraining training{*model, torch::optim::AdamW(PlainTraining::groups(*model, reference.at("optimizer")))};
  for (std::int64_t step = 0; step < reference.at("steps").get<std::int64_t>(); ++step) {
    const double expected = reference.at("losses").at(static_cast<std::size_t>(step)).get<double>();
    const double norm = reference.at("gradient_norms_before_clipping").at(static_cast<std::size_t>(step)).get<double>();
    EXPECT_NEAR(training.step(rows, step * accumulation, accumulation), expected, 1e-5 * expected) << "step " << step;
    EXPECT_NEAR(training.norm, norm, 1e-3 * norm) << "step " << step;
  }
  const SafetensorsReader final_weights(golden(GetParam()) / "reference.safetensors");
  for (const auto& item : model->named_parameters()) {
    const torch::Tensor expected = read_tensor(final_weights, "final." + item.key());
    EXPECT_LT(largest_difference(item.value().detach(), expected), 2e-4) << item.key();
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTraining,
                         testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "gemma2", "gemma3"),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace spillway::test
