// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "spillway/models/causal_lm.h"

namespace spillway {

/// A block's call whose activations are computed again in backward.
struct RecomputedCall : torch::CustomClassHolder {
  std::string block;  // its name, for messages
  BlockForward forward;
  std::vector<torch::Tensor> inputs;      // undefined in the places of those that need a gradient
  std::vector<torch::Tensor> parameters;  // that `forward` reads
  std::vector<torch::Tensor> order;       // the same in the order in which their gradients come, where that matters
  std::vector<std::int64_t> versions;     // of inputs and parameters after the first forward
  /// Runs what it is given with the random numbers of the first forward, and puts the present ones back.
  std::function<void(const std::function<void()>& body)> with_same_random_numbers;
};

/// Runs `call.forward(inputs)` without keeping activations. The outputs' gradients lead to a second forward and its
/// backward, in which parameters get their gradients (through their hooks, inside the outer backward).
/// Source: Chen et al. 2016, arXiv 1604.06174.
std::vector<torch::Tensor> recompute_in_backward(c10::intrusive_ptr<RecomputedCall> call,
                                                 const std::vector<torch::Tensor>& inputs);

/// Calls `visit` with every leaf that a backward from `loss` reaches: once for all its uses outside of recomputed
/// calls, and once for each recomputed call that reads it. That is how often its gradient hook will be called.
void for_gradient_events(const torch::Tensor& loss, const std::function<void(const torch::Tensor&)>& visit);

/// The leaves that a backward from `roots` reaches, in the order in which LibTorch calls their gradient hooks, those of
/// recomputed calls among them: a simulation of its queue, which takes the newest function that is ready. The last time
/// counts where a leaf comes more than once.
std::vector<torch::Tensor> gradient_order(const std::vector<torch::Tensor>& roots);

}  // namespace spillway
