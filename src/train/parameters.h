// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/memory/pool.h"
#include "spillway/train/engine.h"

namespace spillway {

/// A module's parameter, once, however often it is registered.
struct ModelParameter {
  std::string name;                  // the first it is registered under
  std::vector<std::string> aliases;  // the others
  torch::Tensor tensor;
  int group = 0;
  bool trainable = true;
};

/// All parameters of `model` in registration order, with the group each belongs to: the first of `rules` that applies
/// (numbered after the configuration's groups), else as the configuration says.
/// Throws: InvalidArgument naming the parameter that is neither fp32 nor of the configured precision, sparse, a view of
/// another one, not in host memory, undefined, or already managed by an engine.
std::vector<ModelParameter> collect_parameters(const torch::nn::Module& model, const Config& config,
                                               const std::vector<GroupRule>& rules);

/// Makes an fp32 parameter one of `precision` with rounded values; nothing where it is that already. Returns the fp32
/// values, or an undefined tensor where nothing was converted.
torch::Tensor convert_parameter(torch::Tensor& parameter, DType precision);

/// Copies the parameter's bytes (unless told not to keep them) to `target`, memory of `device`, and makes its storage
/// point there; its old memory is freed. Every alias of the tensor, in autograd graphs too, sees the new place; but for
/// a change from one device to another, which makes a new storage: so that takes place before the first graph, and
/// after the last.
void move_to(const torch::Tensor& parameter, const View& target, torch::Device device, bool keep_values = true);

/// Gives the parameter memory of `precision` without values: the system gives none before it is written to.
void forget_values(torch::Tensor& parameter, DType precision);

/// Throws: InvalidArgument where `value` cannot stand for the parameter.
void check_value(const std::string& name, const torch::Tensor& parameter, const torch::Tensor& value);

/// A module's parameters as objects, in its order: what stays the same while their values and memory change.
/// Throws: InvalidArgument for a trained embedding whose forward writes to its weight (max_norm), where that would
/// round masters or tell ranks apart.
void check_embeddings(const torch::nn::Module& model, DType precision, int ranks);

std::vector<const void*> parameter_identities(const torch::nn::Module& module);
/// Throws: StateError naming a parameter that the module got, lost or exchanged since `known` was taken.
void check_parameter_identities(const torch::nn::Module& module, const std::vector<const void*>& known);

/// Gives a parameter that is not contiguous, or a part of a larger storage, a storage of its own.
void own_storage(torch::Tensor& parameter);

/// Gives the parameter ordinary host memory again, with the bytes it has now.
void move_to_ordinary_memory(const torch::Tensor& parameter);

}  // namespace spillway
