// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <vector>

#include "spillway/models/causal_lm.h"

namespace spillway {

/// The models of Spillway's families in a module, itself among them.
std::vector<CausalLM*> causal_lms_in(torch::nn::Module& module);

/// Everything random that a module may draw from, as it is now: LibTorch's own generators of the CPU and of `device`,
/// and the models' dropout. Owns: copies of their states, in ordinary memory; the models must outlive it.
class RandomNumbers {
 public:
  RandomNumbers(const std::vector<CausalLM*>& models, torch::Device device);
  /// Sets all of it back.
  void set() const;

 private:
  struct State {
    at::Generator generator;
    torch::Tensor state;
  };
  struct Dropout {
    CausalLM* model;
    torch::Tensor state;
  };
  std::vector<State> states_;
  std::vector<Dropout> dropout_;
};

}  // namespace spillway
