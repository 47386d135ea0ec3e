// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

namespace spillway {

/// Puts a module and all in it in evaluation mode, and each of them back in the mode it had.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    for (const auto& inner : module.modules(/*include_self=*/false)) inner_.emplace_back(inner, inner->is_training());
    module.eval();
  }
  ~EvaluationMode() {
    module_.train(was_training_);
    for (const auto& [inner, was_training] : inner_) {
      if (inner->is_training() != was_training) inner->train(was_training);
    }
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  const bool was_training_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> inner_;  // outer ones first
};

}  // namespace spillway
