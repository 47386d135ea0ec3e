// SPDX-License-Identifier: Apache-2.0
//
// Faults that users of offloaded training systems met in updates: step counters, groups, decay, rates, weights loaded
// late, parameters of unexpected kinds. docs/field_reports.md says which report each test answers.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "support/scratch.h"
#include "train/branches.h"
#include "train/double_adam.h"

namespace spillway {
namespace {

using test::Branches;
using test::DoubleAdam;
using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;

class UpdateReports : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, UpdateReports, testing::ValuesIn(test::schedule_names()));

void backward(Engine& engine, Branches& model, std::int64_t number, bool use_b = true) {
  const torch::Tensor x = input(number).to(model.a->weight.scalar_type());
  torch::Tensor sum = model.a(x);
  if (use_b) sum = sum + model.b(x);
  engine.backward(model.out(torch::tanh(sum)).to(torch::kFloat).mean(), {.last = true});
}

void copy_all_state(Engine& from, Engine& to, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    to.set_weight(name, from.master(name));
    for (std::int64_t k : {0, 1}) to.set_optimizer_state(name, k, from.optimizer_state(name, k));
    to.set_updates(name, from.updates(name));
  }
}

// ---- counters and groups -------------------------------------------------------------------------------------------

TEST_P(UpdateReports, EachParameterIsCorrectedByTheNumberOfItsOwnUpdates) {
  for (DType precision : {DType::f32, DType::bf16}) {
    Config config = plain(GetParam());
    config.precision = precision;
    GroupConfig nobody, biases;
    nobody.match = "no.such.*";
    biases.match = "*.bias";
    biases.lr = 2e-3;
    biases.weight_decay = 0;
    config.groups = {nobody, biases};
    std::shared_ptr<Branches> model = make_branches();
    auto engine = std::make_unique<Engine>(*model, config);
    const std::vector<std::string> names = model->named_parameters().keys();
    std::map<std::string, DoubleAdam> adam;
    for (const std::string& name : names) adam.emplace(name, engine->master(name));
    for (int step = 0; step < 12; ++step) {
      if (step == 7) {  // everything moves to another engine, whose own counters stand elsewhere
        const auto other = make_branches();
        auto next = std::make_unique<Engine>(*other, config);
        for (int i = 0; i < 2; ++i) backward(*next, *other, i), next->step();
        copy_all_state(*engine, *next, names);
        engine = std::move(next);
        model = other;
      }
      backward(*engine, *model, step, step % 3 == 2);
      for (auto& [name, reference] : adam) {
        const torch::Tensor gradient = engine->gradient(name);
        EXPECT_EQ(gradient.defined(), name[0] != 'b' || step % 3 == 2);
        if (gradient.defined()) reference.step(gradient, engine->hyperparameters(engine->group_of(name)), true);
      }
      engine->step();
      for (const auto& [name, reference] : adam) {
        EXPECT_LT(reference.distance(engine->master(name)), 1e-6) << name << " step " << step;
        EXPECT_EQ(engine->updates(name), reference.t) << name;
      }
    }
  }
}

TEST_P(UpdateReports, GroupsOfEqualNumbersEndInTheBitsOfOneGroup) {
  const auto train = [&](const std::vector<GroupConfig>& groups, std::int64_t chunk) {
    torch::manual_seed(8);
    torch::nn::Sequential model(torch::nn::Linear(7, 60), torch::nn::Tanh(), torch::nn::Linear(60, 40),
                                torch::nn::Tanh(), torch::nn::Linear(torch::nn::LinearOptions(40, 3).bias(false)));
    Config config = plain(GetParam());
    config.chunk_elements = chunk;
    config.clip_norm = 0.05;
    config.groups = groups;
    Engine engine(*model, config);
    for (int step = 0; step < 10; ++step) {
      for (int m = 0; m < 2; ++m) {
        engine.backward(model->forward(input(step * 2 + m)).square().mean(), {.last = m == 1});
      }
      engine.step();
    }
    std::vector<torch::Tensor> out;
    for (const std::string& name : model->named_parameters().keys()) {
      out.push_back(engine.master(name));
      out.push_back(engine.optimizer_state(name, 1));
    }
    return out;
  };
  GroupConfig vectors, nobody;
  vectors.max_dims = 1;
  nobody.match = "absent";
  const auto expected = train({}, 1 << 20);
  for (std::int64_t chunk : {1024, 2048, 1 << 20}) {
    const auto actual = train({nobody, vectors}, chunk);
    ASSERT_EQ(expected.size(), 10u);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(expected[i], actual[i])) << i;
  }
}

// ---- decay and rates -----------------------------------------------------------------------------------------------

TEST_P(UpdateReports, AdamAndAdamWAreEachTheirOwnOnEveryPlacement) {
  for (OptimizerKind kind : {OptimizerKind::adam, OptimizerKind::adamw}) {
    const auto model = make_branches();
    Config config = plain(GetParam());
    config.optimizer = kind;
    config.hyperparameters.lr = 2e-3;
    config.hyperparameters.weight_decay = 0.1;
    Engine engine(*model, config);
    const std::vector<std::string> names = model->named_parameters().keys();
    std::map<std::string, DoubleAdam> adam, other;
    for (const std::string& name : names) {
      adam.emplace(name, engine.master(name));
      other.emplace(name, engine.master(name));
    }
    for (int step = 0; step < 100; ++step) {
      backward(engine, *model, step);
      for (const std::string& name : names) {
        const torch::Tensor gradient = engine.gradient(name);
        adam.at(name).step(gradient, config.hyperparameters, kind == OptimizerKind::adamw);
        other.at(name).step(gradient, config.hyperparameters, kind != OptimizerKind::adamw);
      }
      engine.step();
    }
    for (const std::string& name : names) {
      EXPECT_LT(adam.at(name).distance(engine.master(name)), 1e-5) << to_string(kind) << " " << name;
      EXPECT_GT(other.at(name).distance(engine.master(name)), 1e-3) << to_string(kind) << " " << name;
    }
  }
}

struct VectorOfOnes : torch::nn::Module {
  explicit VectorOfOnes(std::int64_t count) { w = register_parameter("w", torch::ones({count})); }
  torch::Tensor w;
};

TEST_P(UpdateReports, DecayBelowTheResolutionOfBf16IsNotLost) {
  VectorOfOnes model(100);
  Config config = plain(GetParam());
  config.precision = DType::bf16;
  config.hyperparameters.lr = 1e-3;
  config.hyperparameters.weight_decay = 0.1;  // a shrink of 1e-4 a step, where bf16 resolves 4e-3
  Engine engine(model, config);
  for (int step = 0; step < 2000; ++step) {
    engine.backward((model.w * 0).to(torch::kFloat).sum(), {.last = true});
    engine.step();
  }
  const double expected = std::pow(1 - 1e-4, 2000);
  EXPECT_NEAR(engine.master("w").mean().item<double>(), expected, 1e-4);  // two thousand roundings
  EXPECT_NEAR(model.w.detach().to(torch::kFloat).mean().item<double>(), expected, 2e-3);
}

TEST_P(UpdateReports, AStepIsAsLongAsTheRateSays) {
  VectorOfOnes model(10);
  Config config = plain(GetParam());
  config.hyperparameters.weight_decay = 0;
  config.lr_schedule = {LrScheduleConfig::Kind::linear, 2, 6, 0.25};
  Engine engine(model, config);
  std::vector<double> rates;
  for (int step = 0; step < 8; ++step) {
    if (step == 6) engine.set_lr(5e-3);  // half of what it was, as a program's own scheduler would
    const torch::Tensor before = engine.master("w");
    engine.backward((model.w * 3).sum(), {.last = true});  // one direction: Adam moves by the rate
    rates.push_back(engine.step().lr);
    EXPECT_NEAR((before - engine.master("w")).mean().item<double>(), rates.back(), 1e-6) << "step " << step;
  }
  const double expected[] = {5e-3, 1e-2, 1e-2, 8.125e-3, 6.25e-3, 4.375e-3, 1.25e-3, 1.25e-3};
  for (std::size_t i = 0; i < rates.size(); ++i) EXPECT_NEAR(rates[i], expected[i], 1e-12) << i;
}

// ---- states and weights that are set -------------------------------------------------------------------------------

TEST_P(UpdateReports, StatesThatAreSetAHundredTimesTakeNoMemoryAndCountOnce) {
  const auto model = make_branches(), twin = make_branches();
  Engine engine(*model, plain(GetParam())), once(*twin, plain(GetParam()));
  for (int step = 0; step < 3; ++step) backward(engine, *model, step), engine.step();
  const std::vector<std::string> names = model->named_parameters().keys();
  copy_all_state(engine, once, names);
  const MemoryUsage device = engine.memory_in_use(Tier::device), pinned = engine.memory_in_use(Tier::pinned);
  for (int i = 0; i < 100; ++i) copy_all_state(engine, engine, names);
  EXPECT_EQ(engine.memory_in_use(Tier::device), device);
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), pinned);
  for (int step = 3; step < 5; ++step) {
    backward(engine, *model, step), engine.step();
    backward(once, *twin, step), once.step();
  }
  for (const std::string& name : names) EXPECT_TRUE(same_bits(engine.master(name), once.master(name))) << name;
}

// Other weights than make_branches() gives.
std::map<std::string, torch::Tensor> new_weights() {
  torch::manual_seed(99);
  std::map<std::string, torch::Tensor> out;
  for (const auto& entry : Branches().named_parameters()) out[entry.key()] = entry.value().detach().clone();
  return out;
}

// One step that moves nothing, then two that do; the masters at the end.
std::map<std::string, torch::Tensor> train_on(Engine& engine, Branches& model,
                                              std::map<std::string, torch::Tensor>* at_once) {
  std::map<std::string, torch::Tensor> out;
  engine.set_lr(0);
  backward(engine, model, 1), engine.step();
  engine.wait_parameters();
  for (const auto& entry : model.named_parameters()) {
    if (at_once != nullptr) (*at_once)[entry.key()] = entry.value().detach().clone();
  }
  engine.set_lr(1e-3);
  for (int step = 2; step < 4; ++step) backward(engine, model, step), engine.step();
  for (const std::string& name : model.named_parameters().keys()) out[name] = engine.master(name);
  return out;
}

TEST_P(UpdateReports, WeightsLoadedIntoAnEngineAreThoseThatAreTrained) {
  const auto weights = new_weights();
  for (DType precision : {DType::f32, DType::bf16}) {
    for (bool by_name : {false, true}) {
      SCOPED_TRACE(testing::Message() << to_string(precision) << (by_name ? " set_weight" : " copy_"));
      Config config = plain(GetParam());
      config.precision = precision;
      const auto early = make_branches(), late = make_branches();
      const auto load = [&](Branches& model) {
        const torch::NoGradGuard no_grad;
        for (auto& entry : model.named_parameters()) entry.value().copy_(weights.at(entry.key()));
      };
      load(*early);
      // What is copied into a bf16 module is rounded on the way, and its masters are the rounded values.
      if (precision == DType::bf16 && !by_name) early->to(torch::kBFloat16);
      Engine expected(*early, config), engine(*late, config);
      if (by_name) {
        for (const auto& [name, value] : weights) engine.set_weight(name, value);
      } else {
        load(*late);
      }
      std::map<std::string, torch::Tensor> at_once;
      const auto actual = train_on(engine, *late, &at_once);
      const auto type = late->a->weight.scalar_type();
      for (const auto& [name, value] : weights) EXPECT_TRUE(same_bits(at_once.at(name), value.to(type))) << name;
      for (const auto& [name, value] : train_on(expected, *early, nullptr)) {
        EXPECT_TRUE(same_bits(value, actual.at(name))) << name;
      }
    }
  }
}

// ---- kinds of parameters -------------------------------------------------------------------------------------------

TEST_P(UpdateReports, ParametersOfOtherKindsAreRefusedByNameAndKind) {
  const std::pair<torch::Tensor, const char*> cases[] = {
      {torch::zeros({3}, torch::kMeta), "meta"},
      {torch::zeros({3}, torch::kLong), "Long"},
      {torch::zeros({3}, torch::kDouble), "Double"},
      {torch::zeros({3}, torch::kFloat).to(torch::kFloat8_e4m3fn), "Float8_e4m3fn"},
      {torch::zeros({3}, torch::kComplexFloat), "ComplexFloat"},
      {torch::zeros({3}).to_sparse(), "sparse"}};
  for (const auto& [tensor, kind] : cases) {
    struct Odd : torch::nn::Module {
      explicit Odd(const torch::Tensor& t) {
        register_parameter("fine", torch::zeros({3}));
        register_parameter("odd", t, false);
      }
    } model(tensor);
    try {
      Engine engine(model, plain(GetParam()));
      FAIL() << kind << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("parameter odd"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(kind), std::string::npos) << error.what();
    }
  }
}

TEST_P(UpdateReports, AModuleOfTwoTypesKeepsTheExactValuesOfItsFp32Parameters) {
  const auto model = make_branches();
  const torch::Tensor exact = model->out->weight.detach().clone();
  model->a->to(torch::kBFloat16);
  model->b->to(torch::kBFloat16);
  Config config = plain(GetParam());
  config.precision = DType::bf16;
  Engine engine(*model, config);
  EXPECT_TRUE(same_bits(engine.master("out.weight"), exact));
  EXPECT_TRUE(same_bits(engine.master("a.weight"), model->a->weight.detach().to(torch::kFloat)));
  for (int step = 0; step < 3; ++step) backward(engine, *model, step), engine.step();
  EXPECT_EQ(engine.updates("a.weight"), 3);
  EXPECT_EQ(engine.updates("out.weight"), 3);
  config.precision = DType::f32;
  const auto other = make_branches();
  other->a->to(torch::kBFloat16);
  EXPECT_THROW(Engine(*other, config), InvalidArgument);
}

TEST_P(UpdateReports, ParametersOfNoElementsMayStandAnywhere) {
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{0, 8, 24}, {8, 0, 24}, {8, 24, 0}, {0, 8, 0, 24, 0}, {0, 1500, 0, 0, 700, 0}}) {
    struct Pieces : torch::nn::Module {
      explicit Pieces(const std::vector<std::int64_t>& all) {
        for (std::size_t i = 0; i < all.size(); ++i) register_parameter(std::to_string(i), torch::ones({all[i]}));
      }
    };
    Pieces model(sizes);
    Engine engine(model, plain(GetParam()));
    for (int step = 0; step < 2; ++step) {
      torch::Tensor loss = torch::zeros({});
      for (const torch::Tensor& p : model.parameters()) loss = loss + p.sum();
      engine.backward(loss, {.last = true});
      EXPECT_EQ(engine.step().status, StepStatus::updated);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const torch::Tensor master = engine.master(std::to_string(i));
      EXPECT_EQ(master.numel(), sizes[i]);
      EXPECT_TRUE(torch::allclose(master, torch::full({sizes[i]}, 0.9798), 1e-4)) << i;
      EXPECT_EQ(engine.updates(std::to_string(i)), sizes[i] == 0 ? 0 : 2);
    }
    const std::filesystem::path saved = engine.save(test::scratch("no_elements"));
    Pieces loaded(sizes);
    Engine again(loaded, plain(GetParam()));
    again.load(saved);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(same_bits(engine.master(std::to_string(i)), again.master(std::to_string(i)))) << i;
      EXPECT_EQ(engine.updates(std::to_string(i)), again.updates(std::to_string(i))) << i;
    }
  }
}

TEST_P(UpdateReports, AParameterThatCameLaterIsRefusedByName) {
  struct Growing : Branches {
    torch::nn::Linear late{nullptr};
  } model;
  Engine engine(model, plain(GetParam()));
  backward(engine, model, 1);
  engine.step();
  model.late = model.register_module("late", torch::nn::Linear(1, 1));
  engine.backward(model.late(model.forward(input(1), true, true).reshape({1, 1})).sum(), {.last = true});
  try {
    engine.step();
    FAIL() << "a parameter that nobody trains was accepted";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("late.weight"), std::string::npos) << error.what();
  }
  model.unregister_module("late");
  EXPECT_EQ(engine.step().status, StepStatus::updated);
}

}  // namespace
}  // namespace spillway
