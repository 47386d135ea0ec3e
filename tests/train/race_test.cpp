// SPDX-License-Identifier: Apache-2.0
//
// Reads by this file's own code, which the thread sanitizer sees (it does not see LibTorch's), where a program may
// read: inside gates, inside gradient hooks, after step() and after wait_parameters(). Every lane is delayed at random.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/branches.h"

namespace spillway {
namespace {

using test::plain;

double sum_of(const torch::Tensor& tensor) {
  const auto* values = static_cast<const float*>(tensor.const_data_ptr());
  double sum = 0;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) sum += values[i];
  return sum;
}

/// A layer that reads its own weights element by element before it computes.
struct Watched : torch::nn::Module {
  Watched(std::int64_t in, std::int64_t out, std::vector<double>& seen)
      : linear(register_module("linear", torch::nn::Linear(in, out))), seen_(seen) {}
  torch::Tensor forward(const torch::Tensor& x) {
    seen_.push_back(sum_of(linear->weight));
    seen_.push_back(sum_of(linear->bias));
    return torch::tanh(linear(x));
  }
  torch::nn::Linear linear;

 private:
  std::vector<double>& seen_;
};

struct Chain : torch::nn::Module {
  explicit Chain(std::vector<double>& seen) {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<Watched>(i == 0 ? 7 : 40, 40, seen)));
    }
  }
  torch::Tensor forward(Engine& engine, torch::Tensor x, bool recompute) {
    for (auto& layer : layers) x = engine.call(layer, {.recompute = recompute}, x);
    return x.square().mean();
  }
  std::vector<std::shared_ptr<Watched>> layers;
};

std::vector<double> run(const std::string& schedule, unsigned seed, bool recompute) {
  std::vector<double> seen;
  torch::manual_seed(5);
  Chain model(seen);
  EngineOptions options;
  if (seed > 0) {
    options.delay = [seed](const std::string&, const Op&) {
      thread_local std::mt19937 random(seed * 31 +
                                       static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
      if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    };
  }
  Config config = plain(schedule);
  config.clip_norm = 0.01;
  Engine engine(model, config, options);
  for (auto& layer : model.layers) {
    layer->linear->weight.register_hook([&seen](const torch::Tensor& gradient) { seen.push_back(sum_of(gradient)); });
  }
  for (int step = 0; step < 5; ++step) {
    for (int m = 0; m < 2; ++m) {
      engine.backward(model.forward(engine, test::input(step * 2 + m), recompute), {.last = m == 1});
    }
    engine.step();
    if (step % 2 == 1) {
      engine.wait_parameters();
      for (auto& layer : model.layers) seen.push_back(sum_of(layer->linear->weight.detach()));
    }
  }
  return seen;
}

TEST(Races, WhatGatesAndHooksReadDependsOnNoTiming) {
  for (bool recompute : {false, true}) {
    const std::vector<double> expected = run("resident", 0, recompute);
    // Two sums a gate and one a hook; all layers but the first are computed again.
    EXPECT_EQ(expected.size(), 5u * 2 * (recompute ? 18 : 12) + 2 * 4);
    for (unsigned seed = 0; seed < 10; ++seed) {
      EXPECT_EQ(expected, run("zero_offload", seed, recompute)) << "seed " << seed << " recompute " << recompute;
    }
  }
}

}  // namespace
}  // namespace spillway
