// SPDX-License-Identifier: Apache-2.0
#include "models/layers.h"

#include <utility>

#include "models/meta.h"
#include "spillway/core/error.h"

namespace spillway {

Dense::Dense(std::int64_t in, std::int64_t out, bool with_bias, WeightLayout layout,
             const torch::TensorOptions& options)
    : layout_(layout) {
  const bool out_in = layout == WeightLayout::out_in;
  weight = register_parameter("weight", at::empty({out_in ? out : in, out_in ? in : out}, options));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

torch::Tensor Dense::forward(const torch::Tensor& x) const {
  const torch::Tensor plain = linear(x, weight, bias, layout_);
  if (!has_adapter()) return plain;
  const torch::Tensor kept = adapter_.generator->apply(x, adapter_.dropout, is_training());
  return plain + lora_b_->forward(lora_a_->forward(kept)) * adapter_.scaling;
}

void Dense::add_adapter(std::int64_t rank, AdapterSettings settings) {
  const bool out_in = layout_ == WeightLayout::out_in;
  const std::int64_t in = weight.size(out_in ? 1 : 0), out = weight.size(out_in ? 0 : 1);
  const torch::TensorOptions options = weight.options().requires_grad(false);
  const auto add = [&](const char* name, std::int64_t from, std::int64_t to) {
    return register_module(name, std::make_shared<Dense>(from, to, false, WeightLayout::out_in, options));
  };
  lora_a_ = add("lora_A", in, rank);
  lora_b_ = add("lora_B", rank, out);
  adapter_ = std::move(settings);
}

void Dense::remove_adapter() {
  unregister_module("lora_A");
  unregister_module("lora_B");
  lora_a_ = lora_b_ = nullptr;
  adapter_ = {};
}

Embedding::Embedding(std::int64_t rows, std::int64_t width, const torch::TensorOptions& options,
                     std::optional<std::int64_t> padding)
    : weight(register_parameter("weight", at::empty({rows, width}, options))), padding_(padding) {}

torch::Tensor Embedding::forward(const torch::Tensor& tokens) const {
  if (weight.is_meta()) return meta_embedding(weight, tokens);
  return at::embedding(weight, tokens, padding_.value_or(-1));
}

LayerNorm::LayerNorm(std::int64_t width, double epsilon, const torch::TensorOptions& options)
    : weight(register_parameter("weight", at::empty({width}, options))),
      bias(register_parameter("bias", at::empty({width}, options))),
      epsilon_(epsilon) {}

torch::Tensor LayerNorm::forward(const torch::Tensor& x) const {
  if (x.is_meta()) return meta_layer_norm(x, weight, bias);
  return at::layer_norm(x, weight.sizes(), weight, bias, epsilon_);
}

RmsNorm::RmsNorm(std::int64_t width, double epsilon, bool plus_one, const torch::TensorOptions& options)
    : weight(register_parameter("weight", at::empty({width}, options))), epsilon_(epsilon), plus_one_(plus_one) {}

torch::Tensor RmsNorm::forward(const torch::Tensor& x) const {
  const torch::Tensor wide = x.to(torch::kFloat);
  const torch::Tensor mean_square = wide.pow(2).mean(-1, /*keepdim=*/true);
  const torch::Tensor normed = wide * at::rsqrt(mean_square + epsilon_);
  if (plus_one_) return (normed * (1 + weight.to(torch::kFloat))).to(x.scalar_type());
  return weight * normed.to(x.scalar_type());
}

torch::Tensor activate(Activation activation, const torch::Tensor& x) {
  switch (activation) {
    case Activation::gelu:
      return at::gelu(x);
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
    case Activation::relu:
      return at::relu(x);
    case Activation::silu:
      return at::silu(x);
  }
  throw InternalError("An activation without a function.");
}

}  // namespace spillway
