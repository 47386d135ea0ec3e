// SPDX-License-Identifier: Apache-2.0
#include "models/parameter_values.h"

#include <fmt/format.h>

#include <utility>

#include "models/scalar_type.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

bool is_resident(const torch::Tensor& tensor) {
  return tensor.numel() == 0 || (tensor.storage().data() != nullptr && tensor.storage().nbytes() >= tensor.nbytes());
}

}  // namespace

ParameterValues::ParameterValues(const CausalLM& model, Weights weights) : weights_(std::move(weights)) {
  if (!weights_ && model.has_newer_weights()) {
    throw StateError(
        "An engine has this model, and may have newer weights than its parameters: to save, pass the option weights, "
        "[&](const std::string& name) { return engine.weight(name); } (with the model's own path before the name where "
        "it is a part of the engine's module).");
  }
  for (const auto& item : model.named_parameters()) {
    names_.push_back(item.key());
    parameters_.emplace(item.key(), item.value());
  }
}

void ParameterValues::require_readable(const std::string& name) const {
  if (weights_ || is_resident(parameters_.at(name))) return;
  throw StateError(
      fmt::format("The memory of {} is released: go through the engine that holds its weights, or, to save, pass the "
                  "option weights.",
                  name));
}

torch::Tensor ParameterValues::read(const std::string& name) const {
  const torch::Tensor& parameter = parameters_.at(name);
  const torch::Tensor values = weights_ ? weights_(name) : parameter;
  require(values.sizes() == parameter.sizes(),
          fmt::format("The weights given for {} have shape {}, the parameter has {}.", name, c10::str(values.sizes()),
                      c10::str(parameter.sizes())));
  return values.detach();
}

void ask_for(const std::vector<TensorSource>& sources) {
  std::vector<std::byte> bytes;
  for (const TensorSource& source : sources) {
    std::int64_t size = size_of(source.dtype);
    for (const std::int64_t length : source.shape) size *= length;
    bytes.resize(static_cast<std::size_t>(size));
    source.fill(bytes);
  }
}

TensorSource tensor_source(std::string name, std::vector<std::int64_t> shape, DType dtype,
                           std::function<torch::Tensor()> read) {
  return {.name = std::move(name),
          .dtype = dtype,
          .shape = std::move(shape),
          .fill = [read = std::move(read), dtype](std::span<std::byte> target) {
            const torch::Tensor host = read().to(torch::kCPU).contiguous();
            const std::span source(static_cast<const std::byte*>(host.data_ptr()), host.nbytes());
            convert_elements(from_scalar_type(host.scalar_type()), source, dtype, target, host.numel());
          }};
}

}  // namespace spillway
