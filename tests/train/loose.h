// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway::test {

/// Parameters of any sizes, each pulled to its own target; a rank may leave some out.
struct Loose : torch::nn::Module {
  explicit Loose(const std::vector<std::int64_t>& sizes) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::string name = fmt::format("p{}", i);
      all.push_back(
          register_parameter(name, torch::sin(torch::arange(sizes[i], torch::kFloat) + static_cast<double>(i))));
    }
  }
  torch::Tensor loss(std::int64_t step, const std::function<bool(std::size_t)>& uses) {
    torch::Tensor sum = torch::zeros({});
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!uses(i) || all[i].numel() == 0) continue;
      const auto target = torch::cos(torch::arange(all[i].numel(), torch::kFloat) * 0.1 + static_cast<double>(step));
      sum = sum + (all[i] - target).square().sum();
    }
    return sum;
  }
  std::vector<torch::Tensor> all;
};

inline Config loose_config(const char* schedule, int stage) {
  Config config = tiny_config(schedule, 0, 2048, 1);
  config.groups.clear();
  config.stage = stage;
  return config;
}

using States = std::map<std::string, torch::Tensor>;

inline States states_of(Engine& engine, const torch::nn::Module& model) {
  States out;
  for (const std::string& name : trained_names(model)) {
    out[name] = engine.master(name);
    out[name + " 0"] = engine.optimizer_state(name, 0);
    out[name + " 1"] = engine.optimizer_state(name, 1);
    out[name + " updates"] = torch::tensor(engine.updates(name));
  }
  return out;
}

inline void expect_same(const States& expected, const States& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(same_bits(tensor, actual.at(name))) << name;
}

}  // namespace spillway::test
