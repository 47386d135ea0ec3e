// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "spillway/schedule/schedules.h"
#include "train/training_runs.h"

namespace spillway::test {

/// Two independent linear maps and a third that both lead into.
struct Branches : torch::nn::Module {
  Branches()
      : a(register_module("a", torch::nn::Linear(7, 13))),
        b(register_module("b", torch::nn::Linear(7, 13))),
        out(register_module("out", torch::nn::Linear(13, 1))) {}
  torch::Tensor forward(const torch::Tensor& x, bool use_a, bool use_b) {
    torch::Tensor sum = torch::zeros({x.size(0), 13});
    if (use_a) sum = sum + a(x);
    if (use_b) sum = sum + b(x);
    return out(torch::tanh(sum)).mean();
  }
  torch::nn::Linear a, b, out;
};

inline std::shared_ptr<Branches> make_branches() {
  torch::manual_seed(11);
  return std::make_shared<Branches>();
}

inline torch::Tensor input(std::int64_t number) {
  return torch::sin(torch::arange(28, torch::kFloat) * 0.37 + static_cast<double>(number)).reshape({4, 7});
}

inline Config plain(const std::string& schedule) {
  Config config = tiny_config(schedule, 0, 1024, 1);
  config.groups.clear();
  config.hyperparameters = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
  return config;
}

inline std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleEntry& entry : schedules()) names.emplace_back(entry.name);
  return names;
}

}  // namespace spillway::test
