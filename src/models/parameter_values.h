// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "spillway/formats/safetensors.h"
#include "spillway/models/causal_lm.h"

namespace spillway {

/// What a save writes: each parameter's values from `weights` where given, else from the model.
class ParameterValues {
 public:
  using Weights = std::function<torch::Tensor(const std::string& name)>;

  ParameterValues(const CausalLM& model, Weights weights);

  /// A parameter's names and shapes as the model has them, in registration order.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return parameters_.contains(name); }
  std::vector<std::int64_t> shape(const std::string& name) const { return parameters_.at(name).sizes().vec(); }

  /// Throws: StateError for a parameter whose memory is released, where no weights were given.
  void require_readable(const std::string& name) const;
  /// Throws: InvalidArgument where the weights given have another shape.
  torch::Tensor read(const std::string& name) const;

 private:
  std::unordered_map<std::string, torch::Tensor> parameters_;
  std::vector<std::string> names_;
  Weights weights_;
};

/// A tensor of a file with the values that `read` returns when its turn comes, converted to `dtype`.
TensorSource tensor_source(std::string name, std::vector<std::int64_t> shape, DType dtype,
                           std::function<torch::Tensor()> read);

/// Makes each tensor and drops it: what writing them would ask for.
void ask_for(const std::vector<TensorSource>& sources);

}  // namespace spillway
