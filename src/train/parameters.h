// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/memory/pool.h"

namespace spillway {

/// A module's parameter, once, however often it is registered.
struct ModelParameter {
  std::string name;  // the first it is registered under
  torch::Tensor tensor;
  int group = 0;
  bool trainable = true;
};

/// All parameters of `model` in registration order, with the group each belongs to.
/// Throws: InvalidArgument naming the parameter that is of another type than `precision`, sparse, a view of another
/// one, not in host memory, undefined, or already managed by an engine.
std::vector<ModelParameter> collect_parameters(const torch::nn::Module& model, const Config& config);

/// Whether `text` matches `pattern`, where * stands for any run of characters and ? for one.
bool matches(std::string_view pattern, std::string_view text);

/// Copies the parameter's bytes to `target` and makes its storage point there; its old memory is freed. Every alias of
/// the tensor, in autograd graphs too, sees the new place.
void move_to(const torch::Tensor& parameter, const View& target);

/// Gives the parameter ordinary memory again, with the bytes it has now.
void move_to_ordinary_memory(const torch::Tensor& parameter);

}  // namespace spillway
