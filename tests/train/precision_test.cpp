// SPDX-License-Identifier: Apache-2.0
//
// Promise 1 in every working type and with parameters that are tied, frozen, or unused; non-finite steps; loss scaling.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/models/lora.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::same_bits;
using test::tiny_config;

enum class Parts { plain, tied, frozen, unused, lora };
enum class Injected { nothing, infinity_at_step_3, nan_at_step_5 };

/// A net small enough for thousands of runs: embedding, two gated blocks, a head that may be the embedding.
struct Net : torch::nn::Module {
  explicit Net(Parts p)
      : parts(p),
        table(register_module("table", torch::nn::Embedding(32, 24))),
        first(register_module("first", torch::nn::Linear(24, 60))),
        second(register_module("second", torch::nn::Linear(60, 24))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({24})))),
        spare(register_module("spare", torch::nn::Linear(24, 24))) {
    if (p != Parts::tied)
      head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(24, 32).bias(false)));
    if (p == Parts::frozen) {
      for (torch::Tensor& t : first->parameters()) t.set_requires_grad(false);
      table->weight.set_requires_grad(false);
    }
  }

  /// `use_spare`: the spare layer has a gradient in this micro-batch.
  torch::Tensor forward(Engine& engine, const torch::Tensor& tokens, bool use_spare) {
    torch::Tensor x = table(tokens);
    x = x + engine.call(second, torch::tanh(engine.call(first, x)));
    if (use_spare) x = x + spare(x);
    x = norm(x);
    const torch::Tensor logits = torch::matmul(x, (head ? head->weight : table->weight).t());
    return logits.to(torch::kFloat);
  }

  const Parts parts;
  torch::nn::Embedding table;
  torch::nn::Linear first, second;
  torch::nn::LayerNorm norm;
  torch::nn::Linear spare;
  torch::nn::Linear head{nullptr};
};

/// What a cell trains: a module, its logits of some tokens, and a scalar that poisons a gradient.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(Engine& engine, const torch::Tensor& tokens, bool use_spare)> logits;
  std::function<torch::Tensor()> poison;
};

Subject make_subject(Parts parts) {
  if (parts != Parts::lora) {
    const auto net = std::make_shared<Net>(parts);
    return {net,
            [net](Engine& engine, const torch::Tensor& tokens, bool use_spare) {
              return net->forward(engine, tokens, use_spare);
            },
            [net] { return net->second->bias.slice(0, 2, 3).sum(); }};
  }
  ModelConfig shape = test::tiny_llama(true)->config();
  shape.layers = 1;
  shape.hidden = 16;
  shape.intermediate = 24;
  shape.heads = shape.kv_heads = 2;
  const auto model = make_causal_lm(shape, 8);
  add_lora(*model, {.rank = 3, .dropout = 0.1, .targets = {"all-linear"}}, 9);
  model->set_dropout_seed(10);
  model->train();
  return {
      model,
      [model](Engine&, const torch::Tensor& tokens, bool) {
        return model->forward(tokens.unsqueeze(0)).squeeze(0).to(torch::kFloat);
      },
      [model] { return model->named_parameters()["model.layers.0.mlp.up_proj.lora_B.weight"].slice(0, 2, 3).sum(); }};
}

struct Cell {
  DType precision = DType::f32;
  std::int64_t micro_batches = 1;  // of three, the second has weight 0
  double clip = 0;
  Parts parts = Parts::plain;
  Injected injected = Injected::nothing;
};

struct Ending {
  std::map<std::string, torch::Tensor> masters, working, first, second;
  std::vector<StepStatus> statuses;
  std::vector<double> losses, norms, scales;
};

// The loss scale grows after six finite steps: also in a run whose fifth step is not finite.
constexpr std::int64_t kGrowthInterval = 6, kSteps = 20;

double injection(const Cell& cell, std::int64_t step) {
  if (cell.injected == Injected::infinity_at_step_3 && step == 3) return std::numeric_limits<double>::infinity();
  if (cell.injected == Injected::nan_at_step_5 && step == 5) return std::nan("");
  return 0;
}

Ending train(const Cell& cell, const std::string& schedule, std::int64_t chunk, int threads) {
  torch::manual_seed(21);
  const Subject subject = make_subject(cell.parts);
  Config config = tiny_config(schedule, cell.clip, chunk, threads);
  config.precision = cell.precision;
  config.loss_scale = {.initial = 1024, .growth_interval = kGrowthInterval};
  Ending out;
  EngineOptions quiet;
  quiet.log = [](LogLevel, const std::string&) {};
  Engine engine(*subject.module, config, quiet);
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    for (std::int64_t m = 0; m < cell.micro_batches; ++m) {
      const torch::Tensor tokens = (torch::arange(10) * (step % 4 + 1) + m * 3) % 32;
      const bool use_spare = cell.parts != Parts::unused || (step + m) % 3 == 1;
      torch::Tensor loss =
          torch::nn::functional::cross_entropy(subject.logits(engine, tokens, use_spare), (tokens + step) % 32);
      out.losses.push_back(loss.item<double>());
      if (const double bad = injection(cell, step); bad != 0) loss = loss + subject.poison().to(torch::kFloat) * bad;
      const bool nothing = cell.micro_batches == 3 && m == 1;
      engine.backward(nothing ? loss * std::nan("") : loss,
                      {.weight = nothing ? 0.0 : 2.0 + static_cast<double>(m), .last = m + 1 == cell.micro_batches});
    }
    const StepResult result = engine.step();
    out.statuses.push_back(result.status);
    out.norms.push_back(std::isfinite(result.grad_norm) ? result.grad_norm : -1);
    out.scales.push_back(result.loss_scale);
  }
  for (const auto& entry : subject.module->named_parameters()) {
    engine.wait_parameters();
    out.working[entry.key()] = entry.value().detach().clone();
    if (!entry.value().requires_grad()) continue;
    out.masters[entry.key()] = engine.master(entry.key());
    out.first[entry.key()] = engine.optimizer_state(entry.key(), 0);
    out.second[entry.key()] = engine.optimizer_state(entry.key(), 1);
  }
  return out;
}

bool same(const std::map<std::string, torch::Tensor>& a, const std::map<std::string, torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, tensor] : a) {
    if (!b.count(name) || !same_bits(tensor, b.at(name))) return false;
  }
  return true;
}

bool same(const Ending& a, const Ending& b) {
  return same(a.masters, b.masters) && same(a.working, b.working) && same(a.first, b.first) &&
         same(a.second, b.second) && a.statuses == b.statuses && a.losses == b.losses && a.norms == b.norms &&
         a.scales == b.scales;
}

bool grows(const std::vector<double>& scales) {
  return std::adjacent_find(scales.begin(), scales.end(), std::less<>()) != scales.end();
}

class Precision : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, Precision, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(Precision, ZeroOffloadEndsInTheBitsOfTheResidentRunInEveryCell) {
  int cells = 0;
  for (std::int64_t micro_batches : {1, 3}) {
    for (double clip : {0.0, 0.3}) {
      for (Parts parts : {Parts::plain, Parts::tied, Parts::frozen, Parts::unused, Parts::lora}) {
        for (Injected injected : {Injected::nothing, Injected::infinity_at_step_3, Injected::nan_at_step_5}) {
          const Cell cell{GetParam(), micro_batches, clip, parts, injected};
          const Ending expected = train(cell, "resident", 1 << 20, 1);
          for (std::int64_t chunk : {1024, 3 * 1024, 1 << 20}) {
            for (int threads : {1, 2}) {
              ++cells;
              EXPECT_TRUE(same(expected, train(cell, "zero_offload", chunk, threads)))
                  << "micro-batches " << micro_batches << " clip " << clip << " parts " << static_cast<int>(parts)
                  << " injected " << static_cast<int>(injected) << " chunk " << chunk << " threads " << threads;
            }
          }
          const auto skipped = std::count(expected.statuses.begin(), expected.statuses.end(), StepStatus::not_finite);
          EXPECT_EQ(skipped, injected == Injected::nothing ? 0 : 1);
          EXPECT_EQ(grows(expected.scales), GetParam() == DType::f16);
        }
      }
    }
  }
  EXPECT_EQ(cells, 2 * 2 * 5 * 3 * 3 * 2);
}

TEST_P(Precision, WorkingParametersAreTheirMastersRounded) {
  for (const char* schedule : {"resident", "zero_offload"}) {
    const Ending end = train({.precision = GetParam(), .clip = 0.3}, schedule, 1024, 1);
    for (const auto& [name, master] : end.masters) {
      EXPECT_TRUE(same_bits(end.working.at(name), master.to(end.working.at(name).scalar_type()))) << name;
      EXPECT_FALSE(GetParam() != DType::f32 && torch::equal(end.working.at(name).to(torch::kFloat), master))
          << name << ": masters are exact";
    }
  }
}

TEST(Masters, OfAnFp32ModuleKeepItsExactValuesAndOfA16BitOneAreItsValues) {
  torch::manual_seed(2);
  torch::nn::Linear linear(33, 7);
  const torch::Tensor exact = linear->weight.detach().clone();
  Config config = tiny_config("zero_offload", 0, 1024, 1);
  config.precision = DType::bf16;
  {
    Engine engine(*linear, config);
    EXPECT_TRUE(same_bits(engine.master("weight"), exact));
    EXPECT_TRUE(same_bits(linear->weight.detach(), exact.to(torch::kBFloat16)));
  }
  Engine engine(*linear, config);  // the module is in bf16 now
  EXPECT_TRUE(same_bits(engine.master("weight"), exact.to(torch::kBFloat16).to(torch::kFloat)));
}

TEST(Accumulation, ManySmallBf16GradientsAreSummedInFp32) {
  struct One : torch::nn::Module {
    One() { w = register_parameter("w", torch::zeros({1})); }
    torch::Tensor w;
  };
  for (const char* schedule : {"resident", "zero_offload"}) {
    One model;
    Config config = tiny_config(schedule, 0, 1024, 1);
    config.precision = DType::bf16;
    Engine engine(model, config);
    for (int i = 0; i < 1024; ++i) engine.backward((model.w.sum() * 0.01).to(torch::kFloat));
    // The mean gradient, times their number: a bf16 sum would stand still near 4.
    EXPECT_NEAR(engine.step().grad_norm * 1024, 10.24, 0.05);
  }
}

TEST(LossScale, FollowsItsTableAndGivesUpNamingTheParameter) {
  torch::manual_seed(2);
  torch::nn::Linear linear(4, 4);
  Config config = tiny_config("zero_offload", 0, 1024, 1);
  config.precision = DType::f16;
  config.loss_scale = {.initial = 64, .growth_interval = 3, .hysteresis = 2, .minimum = 8, .most_skips_at_minimum = 2};
  std::vector<std::string> messages;
  EngineOptions options;
  options.log = [&](LogLevel level, const std::string& text) {
    if (level == LogLevel::warning) messages.push_back(text);
  };
  Engine engine(*linear, config, options);
  const auto step = [&](bool finite) {
    torch::Tensor loss = linear(torch::ones({1, 4}, torch::kHalf)).sum().to(torch::kFloat) * 0.01;
    if (!finite) loss = loss + linear->bias.sum().to(torch::kFloat) * std::numeric_limits<double>::infinity();
    engine.backward(loss, {.last = true});
    return engine.step();
  };
  const std::vector<std::pair<bool, double>> table = {{true, 64},  {true, 64},  {true, 128}, {false, 128}, {false, 64},
                                                      {false, 32}, {true, 32},  {true, 32},  {true, 64},   {false, 64},
                                                      {false, 32}, {false, 16}, {false, 8},  {false, 8}};
  for (std::size_t i = 0; i < table.size(); ++i) {
    const StepResult result = step(table[i].first);
    EXPECT_EQ(result.loss_scale, table[i].second) << "step " << i;
    EXPECT_EQ(result.status, table[i].first ? StepStatus::updated : StepStatus::not_finite);
  }
  ASSERT_FALSE(messages.empty());
  EXPECT_NE(messages.front().find("loss scale 128 -> 128"), std::string::npos) << messages.front();
  try {
    step(false);
    FAIL() << "training went on at the smallest loss scale";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("bias"), std::string::npos) << error.what();
  }
  EXPECT_EQ(step(true).status, StepStatus::updated);  // nothing is broken: the caller may go on all the same
}

}  // namespace
}  // namespace spillway
