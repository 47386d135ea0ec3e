// SPDX-License-Identifier: Apache-2.0
//
// What a program may do around an engine's calls, and what it is told where that cannot work.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "support/scratch.h"
#include "train/branches.h"
#include "train/checkpoint_tensors.h"
#include "train/faults.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::fault_of;
using test::holds;
using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;
using test::scratch;

class ContractOnEverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, ContractOnEverySchedule, testing::ValuesIn(test::schedule_names()));

// ---- writes to parameters ------------------------------------------------------------------------------------------

torch::Tensor gated_loss(Engine& engine, test::Branches& model, std::int64_t n) {
  const torch::Tensor a = engine.call(model.a, input(n));
  return engine.call(model.out, torch::tanh(a)).mean();
}

TEST_P(ContractOnEverySchedule, AWriteBeforeNewWeightsHaveComeIsTakenOrFoundOut) {
  const auto model = make_branches();
  Config config = plain(GetParam());
  config.device.upload_bandwidth = 100e3;
  Engine engine(*model, config);
  engine.backward(gated_loss(engine, *model, 1), {.last = true});
  engine.step();
  {
    const torch::NoGradGuard no_grad;
    model->out->weight.fill_(0.25);
  }
  bool found_out = false;
  try {
    engine.backward(gated_loss(engine, *model, 2), {.last = true});
    engine.step();
  } catch (const StateError& error) {
    found_out = true;
    EXPECT_TRUE(holds(error.what(), "out.weight")) << error.what();
    EXPECT_TRUE(holds(error.what(), "wait_parameters()")) << error.what();
  }
  EXPECT_EQ(found_out, GetParam() != "resident");
  if (!found_out) {
    EXPECT_LT((engine.master("out.weight") - 0.25).abs().max().item<double>(), 0.012);
  }
}

TEST_P(ContractOnEverySchedule, AWriteThatWasTooEarlyIsMendedBySetWeight) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  engine.backward(gated_loss(engine, *model, 1), {.last = true});
  engine.step();
  {
    const torch::NoGradGuard no_grad;
    model->out->weight.fill_(0.25);
  }
  engine.set_weight("out.weight", torch::full({1, 13}, 0.5));
  engine.backward(gated_loss(engine, *model, 2), {.last = true});
  engine.step();
  EXPECT_LT((engine.master("out.weight") - 0.5).abs().max().item<double>(), 0.012);
}

// A block that a later step leaves out, and one whose parameters had no gradient: nothing is on its way to either.
TEST_P(ContractOnEverySchedule, WhatTheLastStepDidNotUseMayBeWrittenAtOnce) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  const auto loss = [&](bool use_b) {
    torch::Tensor sum = engine.call(model->a, input(1));
    if (use_b) sum = sum + engine.call(model->b, input(1)).detach();  // no gradient goes into it
    return engine.call(model->out, torch::tanh(sum)).mean();
  };
  const auto write = [&] {
    const torch::NoGradGuard no_grad;
    model->b->weight.fill_(0.25);
  };
  engine.backward(gated_loss(engine, *model, 1) + engine.call(model->b, input(1)).mean(), {.last = true});
  engine.step();
  engine.backward(loss(false), {.last = true});
  engine.step();
  write();
  engine.backward(loss(true), {.last = true});
  engine.step();
  write();
  engine.backward(loss(true), {.last = true});
  engine.step();
  EXPECT_EQ((engine.master("b.weight") - 0.25).abs().max().item<double>(), 0);
}

TEST_P(ContractOnEverySchedule, AWriteAfterTheWaitIsTrainedFromThroughGatesToo) {
  const auto model = make_branches();
  Config config = plain(GetParam());
  config.device.upload_bandwidth = 100e3;
  Engine engine(*model, config);
  for (int way = 0; way < 3; ++way) {
    engine.backward(gated_loss(engine, *model, way), {.last = true});
    engine.step();
    // Whatever waits for all weights will do.
    if (way == 0) engine.wait_parameters();
    if (way == 1) static_cast<void>(engine.master("a.weight"));
    if (way == 2) engine.set_weight("a.bias", torch::zeros({13}));
    const torch::NoGradGuard no_grad;
    model->out->weight.fill_(0.25);
  }
  engine.backward(gated_loss(engine, *model, 4), {.last = true});
  engine.step();
  EXPECT_LT((engine.master("out.weight") - 0.25).abs().max().item<double>(), 0.012);
}

struct Renormed : torch::nn::Module {
  explicit Renormed(std::optional<double> max_norm)
      : words(register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).max_norm(max_norm)))) {}
  torch::nn::Embedding words;
};

TEST(EngineContract, AnEmbeddingThatWritesItsWeightInForwardIsRefusedIn16Bits) {
  Config config = plain("resident");
  Renormed model(1.0), plain_model(std::nullopt);
  { Engine engine(model, config); }  // in fp32 a weight is its own master
  config.precision = DType::bf16;
  const std::string told = fault_of<InvalidArgument>([&] { Engine engine(model, config); });
  EXPECT_TRUE(holds(told, "words") && holds(told, "max_norm")) << told;
  Engine engine(plain_model, config);
}

// ---- the step ------------------------------------------------------------------------------------------------------

TEST_P(ContractOnEverySchedule, ADiscardedStepLeavesNothingBehind) {
  for (const double scale : {1.0, 1024.0}) {
    const auto model = make_branches(), untouched = make_branches();
    Config config = plain(GetParam());
    config.clip_norm = 0.5;
    config.loss_scale.initial = scale;
    Engine engine(*model, config), other(*untouched, config);
    engine.discard_step();  // there is none
    for (int n = 0; n < 4; ++n) {
      engine.backward(model->forward(input(n + 10), true, n % 2 == 0), {.weight = 5});
      if (n == 2) engine.backward(model->forward(input(n + 20), true, true), {.weight = 2, .last = true});
      engine.discard_step();
      EXPECT_THROW(engine.step(), StateError);
      for (Engine* e : {&engine, &other}) {
        auto& m = e == &engine ? *model : *untouched;
        e->backward(m.forward(input(n), true, true), {.weight = 3});
        e->backward(m.forward(input(n + 1), n > 1, true), {.last = true});
      }
      EXPECT_EQ(engine.step().grad_norm, other.step().grad_norm);
    }
    for (const std::string& name : test::trained_names(*model)) {
      EXPECT_TRUE(same_bits(engine.master(name), other.master(name))) << name;
      EXPECT_TRUE(same_bits(engine.optimizer_state(name, 1), other.optimizer_state(name, 1))) << name;
      EXPECT_EQ(engine.updates(name), other.updates(name)) << name;
    }
  }
}

TEST_P(ContractOnEverySchedule, ARefusedLossChangesNothing) {
  const auto model = make_branches(), untouched = make_branches();
  Engine engine(*model, plain(GetParam())), other(*untouched, plain(GetParam()));
  for (Engine* e : {&engine, &other}) {
    auto& m = e == &engine ? *model : *untouched;
    e->backward(m.forward(input(1), true, true), {.weight = 2});
    if (e == &engine) {
      EXPECT_THROW(e->backward(torch::ones({2}, torch::requires_grad())), InvalidArgument);
      EXPECT_THROW(e->backward(m.forward(input(1), true, true), {.weight = -1}), InvalidArgument);
    }
    e->backward(m.forward(input(2), true, true), {.last = true});
    e->step();
  }
  EXPECT_TRUE(same_bits(engine.master("out.weight"), other.master("out.weight")));
}

// ---- profile -------------------------------------------------------------------------------------------------------

struct Normed : torch::nn::Module {
  Normed()
      : map(register_module("map", torch::nn::Linear(7, 8))),
        norm(register_module("norm", torch::nn::BatchNorm1d(8))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::dropout(norm(map(x)), 0.5, true).square().mean(); }
  torch::nn::Linear map;
  torch::nn::BatchNorm1d norm;
};

TEST_P(ContractOnEverySchedule, AProfiledForwardLeavesRandomNumbersAndBuffersAsTheyWere) {
  const auto run = [&](bool profiled) {
    torch::manual_seed(3);
    const auto model = std::make_shared<Normed>();
    Engine engine(*model, plain(GetParam()));
    if (profiled) engine.profile([&] { return model->forward(input(9)); });
    engine.backward(model->forward(input(1)), {.last = true});
    engine.step();
    return std::pair(engine.master("map.weight"), model->norm->running_var.clone());
  };
  const auto [weight, variance] = run(false);
  const auto [weight_profiled, variance_profiled] = run(true);
  EXPECT_TRUE(same_bits(weight, weight_profiled));
  EXPECT_TRUE(same_bits(variance, variance_profiled));
}

// A profiling forward through gates, and a training forward that goes past them.
TEST_P(ContractOnEverySchedule, GatesOfAProfileOrAnEvaluationSayNothingOfTheNextForward) {
  const auto model = make_branches();
  Config config = plain(GetParam());
  config.device.upload_bandwidth = 100e3;
  Engine engine(*model, config);
  engine.profile([&] { return gated_loss(engine, *model, 1); });
  {
    const torch::NoGradGuard no_grad;
    static_cast<void>(gated_loss(engine, *model, 2));
  }
  engine.backward(model->forward(input(1), true, true), {.last = true});
  engine.step();
  const torch::Tensor here = model->out->weight.detach().clone();
  EXPECT_TRUE(same_bits(here, engine.master("out.weight")));
}

TEST(EngineContract, RandomNumbersThatWouldBeReadFromBehindTheirTableAreRefused) {
  torch::manual_seed(1);
  static_cast<void>(torch::rand({5}));
  const torch::Tensor state = random_state(torch::kCPU);
  check_random_state(torch::kCPU, state, "whole");
  torch::Tensor spoilt = state.clone();
  const std::int32_t left = 624;
  std::memcpy(spoilt.mutable_data_ptr<std::uint8_t>() + 8, &left, sizeof(left));
  const std::string told = fault_of<FileError>([&] { check_random_state(torch::kCPU, spoilt, "spoilt"); });
  EXPECT_TRUE(holds(told, "624 numbers left at place 5")) << told;
}

// ---- who is who ----------------------------------------------------------------------------------------------------

TEST(EngineContract, CallsFromAnotherThreadAreRefused) {
  const auto model = make_branches();
  Engine engine(*model, plain("zero_offload"));
  engine.backward(model->forward(input(1), true, true), {.last = true});
  std::string told, gate;
  std::thread([&] {
    told = fault_of<StateError>([&] { engine.step(); });
    gate = fault_of<StateError>([&] { engine.call(model->a, input(1)); });
  }).join();
  EXPECT_TRUE(holds(told, "another thread")) << told;
  EXPECT_TRUE(holds(gate, "another thread")) << gate;
  EXPECT_EQ(engine.step().status, StepStatus::updated);
}

TEST(EngineContract, FrozenParametersBelongToOneEngineToo) {
  const auto base = make_branches();
  for (auto& parameter : base->parameters()) parameter.set_requires_grad(false);
  struct WithHead : torch::nn::Module {
    explicit WithHead(std::shared_ptr<test::Branches> trunk) {
      register_module("trunk", std::move(trunk));
      head = register_module("head", torch::nn::Linear(1, 1));
    }
    torch::nn::Linear head = nullptr;
  };
  const auto first = std::make_shared<WithHead>(base), second = std::make_shared<WithHead>(base);
  {
    Engine engine(*first, plain("resident"));
    const std::string told = fault_of<InvalidArgument>([&] { Engine other(*second, plain("resident")); });
    EXPECT_TRUE(holds(told, "trunk.a.weight") && holds(told, "another engine")) << told;
  }
  Engine engine(*second, plain("resident"));  // the first one has ended
}

TEST(EngineContract, AParameterThatIsAResultIsRefused) {
  struct Scaled : torch::nn::Module {
    Scaled() { register_parameter("w", torch::randn({4}, torch::requires_grad()) * 0.02); }
  } module;
  const std::string told = fault_of<InvalidArgument>([&] { Engine engine(module, plain("resident")); });
  EXPECT_TRUE(holds(told, "parameter w is the result of an operation")) << told;
}

TEST(EngineContract, ActivationsCountForTheEngineWhoseCallMakesThem) {
  const auto first_model = make_branches(), second_model = make_branches();
  Engine first(*first_model, plain("zero_offload"));
  const MemoryPlan alone = first.profile([&] { return gated_loss(first, *first_model, 1); });
  const torch::Tensor x = [] {
    const HostScope host;
    return input(1);
  }();
  Engine second(*second_model, plain("zero_offload"));  // the newest
  const MemoryPlan beside = first.profile([&] { return gated_loss(first, *first_model, 1); });
  EXPECT_GT(alone[Tier::device][MemoryUse::activations].value, 0);
  EXPECT_EQ(beside[Tier::device][MemoryUse::activations].value, alone[Tier::device][MemoryUse::activations].value);
  EXPECT_EQ(second.summary().device_at_peak[MemoryUse::activations].value, 0);
  torch::Tensor kept = first.call(first_model->a, x);
  EXPECT_GT(first.memory_in_use(Tier::device)[MemoryUse::activations].value, 0);
  EXPECT_EQ(second.memory_in_use(Tier::device)[MemoryUse::activations].value, 0);
}

TEST(EngineContract, AnEngineThatIsMadeInsideAHostScopeCountsAfterIt) {
  const auto model = make_branches();
  std::unique_ptr<Engine> engine;
  {
    const HostScope host;
    engine = std::make_unique<Engine>(*model, plain("zero_offload"));
  }
  const Bytes before = engine->memory_in_use(Tier::device).total();
  const torch::Tensor outside = input(1);
  EXPECT_GT(engine->memory_in_use(Tier::device).total().value, before.value);
}

TEST(EngineContract, WhatAHostScopeHoldsCountsNowhereInBlocksToo) {
  const auto model = make_branches();
  Engine engine(*model, plain("zero_offload"));
  const Bytes before = engine.memory_in_use(Tier::device).total();
  const HostScope host;
  const torch::Tensor kept = engine.call(model->a, input(1));
  EXPECT_EQ(engine.memory_in_use(Tier::device).total().value, before.value);
}

TEST(EngineContract, BuffersThatNoCheckpointHoldsAreRefusedAtOnceAndComplexOnesAreKept) {
  struct Rotating : torch::nn::Module {
    explicit Rotating(torch::ScalarType type) : map(register_module("map", torch::nn::Linear(7, 3))) {
      freqs = register_buffer("freqs", torch::arange(3).to(type));
    }
    torch::Tensor forward(const torch::Tensor& x) { return map(x).square().mean(); }
    torch::nn::Linear map;
    torch::Tensor freqs;
  };
  Rotating odd(torch::kFloat8_e5m2);
  const std::string told = fault_of<InvalidArgument>([&] { Engine engine(odd, plain("resident")); });
  EXPECT_TRUE(holds(told, "buffer freqs")) << told;

  const std::filesystem::path root = scratch("complex");
  Rotating saved(torch::kComplexFloat), loaded(torch::kComplexFloat);
  {
    Engine engine(saved, plain("resident"));
    engine.backward(saved.forward(input(1)), {.last = true});
    engine.step();
    saved.freqs.mul_(c10::complex<float>(0, 2));
    engine.save(root);
  }
  loaded.freqs.copy_(torch::conj(saved.freqs));
  Engine engine(loaded, plain("resident"));
  engine.load(root);
  EXPECT_TRUE(torch::equal(saved.freqs, loaded.freqs));
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace spillway
