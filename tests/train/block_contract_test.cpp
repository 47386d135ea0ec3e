// SPDX-License-Identifier: Apache-2.0
//
// What blocks a program may call through an engine's gate, and models inside of others.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "support/scratch.h"
#include "train/branches.h"
#include "train/dropout_model.h"
#include "train/faults.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::fault_of;
using test::gpt2_with_dropout;
using test::holds;
using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;
using test::scratch;
using test::tiny_config;
using test::tiny_llama;

// ---- blocks --------------------------------------------------------------------------------------------------------

TEST(BlockContract, ABlockThatLiesWhereAnotherLayIsAwaitedByItsOwnParameters) {
  const auto model = make_branches();
  Config config = plain("zero_offload");
  config.device.upload_bandwidth = 100e3;
  config.chunk_elements = 1024;
  Engine engine(*model, config);
  // Views of parts of the model at one address: which part, changes from call to call.
  struct View : torch::nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, parameters()[0], parameters()[1]); }
    void look_at(torch::nn::Linear& part) {
      if (!children().empty()) unregister_module("part");
      register_module("part", part);
    }
  };
  const auto view = std::make_shared<View>();
  for (int n = 0; n < 4; ++n) {
    view->look_at(n % 2 == 0 ? model->a : model->b);
    const torch::Tensor y = engine.call(view, input(n));
    view->look_at(model->out);
    engine.backward(engine.call(view, torch::tanh(y)).mean(), {.last = true});
    engine.step();
    view->look_at(n % 2 == 0 ? model->b : model->a);
    const torch::NoGradGuard no_grad;
    const torch::Tensor seen = engine.call(view, input(n));
    EXPECT_TRUE(same_bits(seen, torch::linear(input(n), engine.master(n % 2 == 0 ? "b.weight" : "a.weight"),
                                              engine.master(n % 2 == 0 ? "b.bias" : "a.bias"))));
  }
}

struct Awkward : torch::nn::Module {
  Awkward() : map(register_module("map", torch::nn::Linear(7, 7))) {}
  torch::Tensor forward(torch::Tensor x) {
    if (in_place) x += map(x);
    return in_place ? x : x + map(x);
  }
  torch::Tensor forward(const torch::Tensor& x, const std::vector<torch::Tensor>& more) { return map(x) + more.at(0); }
  torch::Tensor forward(const torch::Tensor& x, const std::optional<torch::Tensor>& more) { return map(x) + *more; }
  torch::Tensor forward(const torch::Tensor& x, const std::pair<int, std::array<torch::Tensor, 1>>& more) {
    return map(x) + more.second[0];
  }
  bool in_place = false;
  torch::nn::Linear map;
};

TEST(BlockContract, RecomputeRefusesWhatItWouldGetWrong) {
  const auto block = std::make_shared<Awkward>();
  Engine engine(*block, plain("zero_offload"));
  const torch::Tensor x = input(1).requires_grad_();
  const CallOptions again{.recompute = true};
  block->in_place = true;
  EXPECT_TRUE(holds(fault_of<InvalidArgument>([&] { engine.call(block, again, x * 1); }), "changes an input in place"));
  block->in_place = false;
  EXPECT_TRUE(engine.call(block, again, x * 1).requires_grad());
  const auto told = [&](const auto& more) {
    return fault_of<InvalidArgument>([&] { engine.call(block, again, x * 1, more); });
  };
  EXPECT_TRUE(holds(told(std::vector<torch::Tensor>{x}), "holds tensors inside"));
  EXPECT_TRUE(holds(told(std::optional<torch::Tensor>(x)), "holds tensors inside"));
  EXPECT_TRUE(holds(told(std::pair<int, std::array<torch::Tensor, 1>>(1, {x})), "holds tensors inside"));
  EXPECT_TRUE(engine.call(block, x * 1, std::vector<torch::Tensor>{x}).requires_grad());  // without recompute: as it is
  const std::vector<torch::Tensor> constant{x.detach()};
  EXPECT_TRUE(engine.call(block, again, x * 1, constant).requires_grad());
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  const std::string autocast = fault_of<InvalidArgument>([&] { engine.call(block, again, x * 1); });
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  EXPECT_TRUE(holds(autocast, "autocast")) << autocast;
}

TEST(BlockContract, RecomputeFindsOutWhatWasWrittenBeforeItsSecondForward) {
  const auto block = std::make_shared<Awkward>();
  Engine engine(*block, plain("zero_offload"));
  struct Masked : torch::nn::Module {
    torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask) { return x * mask.sin(); }
  };
  const auto masked = std::make_shared<Masked>();
  torch::Tensor mask = torch::ones({4, 7});
  const auto loss = [&] {
    return engine.call(masked, CallOptions{.recompute = true}, engine.call(block, input(1)), mask).mean();
  };
  const torch::Tensor first = loss();
  mask.fill_(2);
  const std::string told = fault_of<InvalidArgument>([&] { engine.backward(first + loss(), {.last = true}); });
  EXPECT_TRUE(holds(told, "was written between its forward and its backward")) << told;
  engine.backward(loss(), {.last = true});  // the step starts again
  EXPECT_EQ(engine.step().status, StepStatus::updated);
}

// ---- a model inside another ----------------------------------------------------------------------------------------

class BlocksOnEverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, BlocksOnEverySchedule, testing::ValuesIn(test::schedule_names()));

struct Reward : torch::nn::Module {
  Reward() {
    torch::manual_seed(4);
    trunk = register_module("trunk", gpt2_with_dropout());
    trunk->set_dropout_seed(7);
    head = register_module("head", torch::nn::Linear(64, 1));
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return head(trunk->forward(tokens)).square().mean(); }
  std::shared_ptr<CausalLM> trunk;
  torch::nn::Linear head = nullptr;
};

void reward_step(Engine& engine, Reward& model, std::int64_t n) {
  const torch::Tensor tokens = (torch::arange(16) * 7 + n).remainder(64).reshape({2, 8});
  engine.backward(model.forward(tokens), {.last = true});
  engine.step();
}

TEST_P(BlocksOnEverySchedule, AModelInsideAnotherIsRecomputedAndResumedBitForBit) {
  const std::filesystem::path root = scratch("nested");
  Config config = plain(GetParam());
  Reward whole;
  Engine expected(whole, config);
  for (int n = 0; n < 4; ++n) reward_step(expected, whole, n);
  config.recompute = true;
  {
    Reward model;
    Engine engine(model, config);
    for (int n = 0; n < 2; ++n) reward_step(engine, model, n);
    engine.save(root);
  }
  Reward resumed;
  Engine engine(resumed, config);
  engine.load(root);
  for (int n = 2; n < 4; ++n) reward_step(engine, resumed, n);
  for (const std::string& name : test::trained_names(whole)) {
    EXPECT_TRUE(same_bits(expected.master(name), engine.master(name))) << name;
  }
}

TEST(BlockContract, AModelThatWasReplacedInsideAnotherIsLeftInPeace) {
  Reward model;
  {
    Engine engine(model, plain("zero_offload"));
    model.replace_module("trunk", gpt2_with_dropout());
    model.trunk.reset();
    EXPECT_THROW(engine.save(scratch("replaced")), StateError);
  }
}

TEST(BlockContract, ABoundModelIsSavedThroughItsEngine) {
  const std::filesystem::path folder = scratch("bound");
  const auto model = tiny_llama(true);
  Engine engine(*model, tiny_config("zero_offload", 0, 4096, 1));
  const std::string told = fault_of<StateError>([&] { save_causal_lm(*model, folder); });
  EXPECT_TRUE(holds(told, "engine.weight(name)")) << told;
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
  SaveOptions options;
  options.weights = [&](const std::string& name) { return engine.weight(name); };
  save_causal_lm(*model, folder, options);
  engine.release();
  save_causal_lm(*model, folder);  // an ordinary module meanwhile
  engine.restore();
  EXPECT_THROW(save_causal_lm(*model, folder), StateError);
}

}  // namespace
}  // namespace spillway
