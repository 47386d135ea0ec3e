// SPDX-License-Identifier: Apache-2.0
#include "train/training_runs.h"

#include <gtest/gtest.h>

#include "support/bits.h"

namespace spillway::test {
namespace {

constexpr std::int64_t kRunRows = 2, kRunLength = 12, kRunVocabulary = 64;

/// Learnable rows: each counts up by a stride. A few targets are masked so that micro-batches differ in weight.
std::pair<torch::Tensor, torch::Tensor> rows(std::int64_t step, std::int64_t micro_batch) {
  const std::int64_t number = step * 8 + micro_batch;
  torch::Tensor tokens = torch::empty({kRunRows, kRunLength + 1}, torch::kLong);
  for (std::int64_t r = 0; r < kRunRows; ++r) {
    for (std::int64_t t = 0; t <= kRunLength; ++t) {
      tokens[r][t] = ((number * 7 + r * 3) + (r + 1 + number % 3) * t) % kRunVocabulary;
    }
  }
  torch::Tensor targets = tokens.slice(1, 1).clone();
  targets[0].slice(0, 0, number % 5) = -100;
  return {tokens.slice(1, 0, kRunLength).contiguous(), targets.contiguous()};
}

void run_steps(CausalLM& model, Engine& engine, const RunOptions& options, FinalState& out) {
  const Communicator* const ranks = options.engine.communicator;
  const std::int64_t count = ranks == nullptr ? 1 : ranks->size(), rank = ranks == nullptr ? 0 : ranks->rank();
  for (std::int64_t step = 0; step < options.steps; ++step) {
    double loss_sum = 0;
    for (std::int64_t m = 0; m < options.micro_batches; ++m) {
      const auto [inputs, targets] = rows(step, m * count + rank);
      const std::int64_t valid = count_targets(targets);
      const torch::Device device = model.parameters().front().device();
      const torch::Tensor loss = next_token_loss(model.forward(inputs.to(device)), targets.to(device), valid);
      const double weight = options.weight ? options.weight(step, m, valid) : static_cast<double>(valid);
      engine.backward(loss, {.weight = weight, .last = m + 1 == options.micro_batches});
      loss_sum += loss.item<double>();
    }
    const StepResult result = engine.step();
    out.losses.push_back(loss_sum);
    out.norms.push_back(result.grad_norm);
    out.statuses.push_back(result.status);
  }
}

void expect_same_map(const char* what, const std::map<std::string, torch::Tensor>& expected,
                     const std::map<std::string, torch::Tensor>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(actual.count(name)) << what << " " << name;
    EXPECT_TRUE(same_bits(tensor, actual.at(name))) << what << " of " << name << " differ";
  }
}

}  // namespace

std::shared_ptr<CausalLM> tiny_llama(bool tied, std::uint64_t seed) {
  ModelConfig config;
  config.family = ModelFamily::llama;
  config.vocabulary = kRunVocabulary;
  config.hidden = 32;
  config.intermediate = 80;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.max_position = 32;
  config.tied_head = tied;
  return make_causal_lm(config, seed);
}

std::vector<std::string> trained_names(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& entry : model.named_parameters()) {
    if (entry.value().requires_grad()) names.push_back(entry.key());
  }
  return names;
}

Config tiny_config(const std::string& schedule, double clip_norm, std::int64_t chunk_elements, int threads) {
  Config config;
  config.schedule = schedule;
  config.hyperparameters = {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  GroupConfig no_decay;
  no_decay.max_dims = 1;
  no_decay.weight_decay = 0;
  config.groups.push_back(no_decay);
  config.clip_norm = clip_norm;
  config.chunk_elements = chunk_elements;
  config.threads = threads;
  return config;
}

FinalState train(const std::shared_ptr<CausalLM>& model, const Config& config, const RunOptions& options) {
  FinalState out;
  Engine engine(*model, config, options.engine);
  run_steps(*model, engine, options, out);
  for (const std::string& name : trained_names(*model)) {
    out.masters[name] = engine.master(name);
    out.first_moments[name] = engine.optimizer_state(name, 0);
    out.second_moments[name] = engine.optimizer_state(name, 1);
    out.updates[name] = engine.updates(name);
  }
  for (const auto& entry : model->named_parameters()) {
    const HostScope host;
    out.weights[entry.key()] =
        entry.value().detach().to(torch::kCPU, entry.value().scalar_type(), false, /*copy=*/true);
  }
  return out;
}

void expect_same_bits(const FinalState& expected, const FinalState& actual) {
  expect_same_map("weights", expected.weights, actual.weights);
  expect_same_map("masters", expected.masters, actual.masters);
  expect_same_map("first moments", expected.first_moments, actual.first_moments);
  expect_same_map("second moments", expected.second_moments, actual.second_moments);
  EXPECT_EQ(expected.updates, actual.updates);
  EXPECT_EQ(expected.losses, actual.losses);
  EXPECT_EQ(expected.statuses, actual.statuses);
  for (std::size_t i = 0; i < expected.norms.size(); ++i) {
    if (std::isfinite(expected.norms[i])) {
      EXPECT_EQ(expected.norms[i], actual.norms.at(i)) << "norm of step " << i;
    }
  }
}

}  // namespace spillway::test
