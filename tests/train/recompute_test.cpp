// SPDX-License-Identifier: Apache-2.0
//
// Recompute of a block's activations changes memory, not bits.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/branches.h"
#include "train/dropout_model.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::expect_same_bits;
using test::FinalState;
using test::gpt2_with_dropout;
using test::plain;
using test::RunOptions;
using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

TEST(Recompute, GivesTheBitsOfTheRunThatKeepsActivations) {
  for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
    for (bool tied : {false, true}) {
      for (std::int64_t micro_batches : {1, 3}) {
        SCOPED_TRACE(testing::Message() << to_string(precision) << " tied " << tied << " x" << micro_batches);
        Config config = tiny_config("resident", 0.5, 1 << 20, 1);
        config.precision = precision;
        config.loss_scale.initial = 1024;
        const RunOptions options{.steps = 8, .micro_batches = micro_batches};
        const FinalState expected = test::train(tiny_llama(tied), config, options);
        config.recompute = true;
        expect_same_bits(expected, test::train(tiny_llama(tied), config, options));
        Config offloaded = tiny_config("zero_offload", 0.5, 2048, 2);
        offloaded.precision = precision;
        offloaded.loss_scale.initial = 1024;
        offloaded.recompute = true;
        expect_same_bits(expected, test::train(tiny_llama(tied), offloaded, options));
      }
    }
  }
}

TEST(Recompute, DrawsTheSameDropoutMasksAgain) {
  Config config = tiny_config("zero_offload", 0, 4096, 1);
  const RunOptions options{.steps = 5, .micro_batches = 2};
  const auto run = [&](std::uint64_t seed) {
    const auto model = gpt2_with_dropout();
    model->train();
    model->set_dropout_seed(seed);
    return test::train(model, config, options);
  };
  const FinalState expected = run(7);
  const FinalState other = run(8);
  EXPECT_NE(expected.losses, other.losses) << "dropout acts in these runs";
  config.recompute = true;
  expect_same_bits(expected, run(7));
}

TEST(Recompute, HoldsLessOnTheDevice) {
  const auto peak = [](bool recompute) {
    const auto model = tiny_llama(false);
    Config config = tiny_config("zero_offload", 0, 4096, 1);
    config.recompute = recompute;
    Engine engine(*model, config);
    const torch::Tensor tokens = torch::arange(32 * 32).reshape({32, 32}) % 64;
    engine.backward(next_token_loss(model->forward(tokens), tokens, 32 * 32), {.last = true});
    return engine.step().device_peak;
  };
  EXPECT_LT(peak(true).value, peak(false).value * 3 / 4);
}

// Two outputs, of which one may go unused; takes something that is no tensor too; draws LibTorch's random numbers.
struct TwoWays : torch::nn::Module {
  TwoWays()
      : left(register_module("left", torch::nn::Linear(13, 13))),
        right(register_module("right", torch::nn::Linear(13, 13))) {}
  std::vector<torch::Tensor> forward(const torch::Tensor& x, double p) {
    return {left(torch::dropout(x, p, true)), right(x)};
  }
  torch::nn::Linear left, right;
};

struct Counts : torch::nn::Module {
  std::int64_t forward(const torch::Tensor& x) { return x.numel(); }
};

TEST(Recompute, OfAnyModuleThroughTheGateWithUnusedOutputsAndSharedBlocks) {
  for (const char* schedule : {"resident", "zero_offload"}) {
    struct Model : torch::nn::Module {
      Model()
          : first(register_module("first", torch::nn::Linear(7, 13))),
            block(register_module("block", std::make_shared<TwoWays>())) {}
      torch::Tensor forward(Engine& engine, const torch::Tensor& x, bool recompute) {
        torch::Tensor y = torch::tanh(engine.call(first, x));
        for (int i = 0; i < 3; ++i) y = torch::tanh(engine.call(block, {.recompute = recompute}, y, 0.1)[0]) + y;
        return (y * y).mean();
      }
      torch::nn::Linear first;
      std::shared_ptr<TwoWays> block;
    };
    std::vector<torch::Tensor> ends;
    for (bool recompute : {false, true}) {
      torch::manual_seed(9);
      Model model;
      Engine engine(model, plain(schedule));
      for (int step = 0; step < 4; ++step) {
        engine.backward(model.forward(engine, test::input(step), recompute), {.last = true});
        engine.step();
        EXPECT_EQ(engine.updates("block.right.weight"), 0) << "it is in no used output";
      }
      EXPECT_EQ(engine.updates("block.left.weight"), 4);
      for (const char* name : {"first.weight", "block.left.weight"}) ends.push_back(engine.master(name));
      ends.push_back(torch::rand({4}));  // the random numbers stand where they would have stood
    }
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(ends[i], ends[i + 3])) << i;
  }
}

TEST(Recompute, IsRefusedForBlocksThatReturnNoTensors) {
  Counts counts;
  counts.register_parameter("w", torch::zeros({2}));
  Engine engine(counts, plain("resident"));
  EXPECT_EQ(engine.call(counts, torch::ones({3})), 3);
  EXPECT_THROW(engine.call(counts, {.recompute = true}, torch::ones({3})), InvalidArgument);
}

TEST(Recompute, AFailureInsideLeavesTheStepToBeTriedAgain) {
  const auto model = tiny_llama(false), reference = tiny_llama(false);
  Config config = tiny_config("zero_offload", 0, 4096, 1);
  config.recompute = true;
  const Config plain_config = config;
  const Bytes states = plan_memory(*model, config)[Tier::device].total();
  config.device.memory = states + Bytes{500 * 1024};
  const auto backward = [](CausalLM& m, Engine& e, std::int64_t rows) {
    const torch::Tensor tokens = torch::arange(rows * 12).reshape({rows, 12}) % 64;
    e.backward(next_token_loss(m.forward(tokens), tokens, rows * 12), {.last = true});
  };
  Engine engine(*model, config);
  EXPECT_THROW(backward(*model, engine, 96), OutOfMemory);
  backward(*model, engine, 2);
  engine.step();
  Engine other(*reference, plain_config);
  backward(*reference, other, 2);
  other.step();
  for (const std::string& name : test::trained_names(*model))
    EXPECT_TRUE(same_bits(engine.master(name), other.master(name))) << name;
}

}  // namespace
}  // namespace spillway
