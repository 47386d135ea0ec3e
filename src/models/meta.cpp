// SPDX-License-Identifier: Apache-2.0
#include "models/meta.h"

namespace spillway {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct MetaEmbedding : torch::autograd::Function<MetaEmbedding> {
  static Tensor forward(AutogradContext* context, const Tensor& weight, const Tensor& tokens) {
    context->save_for_backward({tokens});
    context->saved_data["shape"] = weight.sizes();
    std::vector<std::int64_t> shape = tokens.sizes().vec();
    shape.push_back(weight.size(1));
    return at::empty(shape, weight.options());
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::vector<std::int64_t> shape = context->saved_data["shape"].toIntVector();
    return {at::empty(shape, gradients[0].options()), Tensor()};
  }
};

struct MetaLayerNorm : torch::autograd::Function<MetaLayerNorm> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    std::vector<std::int64_t> rows = x.sizes().vec();
    rows.back() = 1;
    const auto wide = x.options().dtype(torch::kFloat);
    context->save_for_backward({x, weight, bias});
    // Means and deviations of the rows, kept in fp32.
    context->saved_data["statistics"] = std::vector<Tensor>{at::empty(rows, wide), at::empty(rows, wide)};
    return at::empty_like(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    variable_list out;
    for (const Tensor& input : saved) out.push_back(at::empty(input.sizes(), gradients[0].options()));
    return out;
  }
};

}  // namespace

Tensor meta_embedding(const Tensor& weight, const Tensor& tokens) {
  return MetaEmbedding::apply(weight, tokens);
}

Tensor meta_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return MetaLayerNorm::apply(x, weight, bias);
}

}  // namespace spillway
