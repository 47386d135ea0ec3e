// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "spillway/models/causal_lm.h"

namespace spillway {

/// The models of Spillway's families in a module, and the module itself where it is one. Owns: those inside, which the
/// program may replace meanwhile; the module itself is not owned.
std::vector<std::shared_ptr<CausalLM>> causal_lms_in(torch::nn::Module& module);

/// Everything random that a module may draw from, as it is now: LibTorch's own generators of the CPU and of `device`,
/// and the models' dropout. Owns: copies of their states, in ordinary memory, and the models as causal_lms_in.
class RandomNumbers {
 public:
  RandomNumbers(const std::vector<std::shared_ptr<CausalLM>>& models, torch::Device device);
  /// Sets all of it back.
  void set() const;

 private:
  struct State {
    at::Generator generator;
    torch::Tensor state;
  };
  struct Dropout {
    std::shared_ptr<CausalLM> model;
    torch::Tensor state;
  };
  std::vector<State> states_;
  std::vector<Dropout> dropout_;
};

}  // namespace spillway
