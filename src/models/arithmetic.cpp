// SPDX-License-Identifier: Apache-2.0
#include "models/arithmetic.h"

namespace spillway {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool needs_widening(const Tensor& x) {
  // Tensors without memory stand for those of a processor: what they count as includes the widened copies.
  return (x.is_cpu() || x.is_meta()) && (x.scalar_type() == torch::kBFloat16 || x.scalar_type() == torch::kHalf);
}

Tensor wide(const Tensor& x) {
  return x.to(torch::kFloat);
}

Tensor rows_of(const Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

Tensor plain_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
  if (layout == WeightLayout::out_in) return at::linear(x, weight, bias);
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(1);
  const Tensor rows = rows_of(x);
  return (bias.defined() ? at::addmm(bias, rows, weight) : at::mm(rows, weight)).view(shape);
}

// Saves the 16-bit tensors, not their widened copies: those live for one product only. The bias stands before the
// weight, as in LibTorch's addmm, so that gradients become ready in one order in all types.
struct WideLinear : torch::autograd::Function<WideLinear> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const std::optional<Tensor>& bias,
                        const Tensor& weight, bool out_in) {
    context->save_for_backward({x, weight});
    context->saved_data["out_in"] = out_in;
    context->saved_data["bias"] = bias.has_value();
    const WeightLayout layout = out_in ? WeightLayout::out_in : WeightLayout::in_out;
    return plain_linear(wide(x), wide(weight), bias ? wide(*bias) : Tensor(), layout).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list outputs) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const bool out_in = context->saved_data["out_in"].toBool();
    const Tensor gradient = rows_of(wide(outputs[0]));
    variable_list result(4);
    if (context->needs_input_grad(0)) {
      const Tensor matrix = wide(weight);
      result[0] = at::mm(gradient, out_in ? matrix : matrix.t()).view(x.sizes()).to(x.scalar_type());
    }
    const bool bias = context->saved_data["bias"].toBool();
    if (bias && context->needs_input_grad(1)) result[1] = gradient.sum(0).to(weight.scalar_type());
    if (context->needs_input_grad(bias ? 2 : 1)) {  // counts tensors alone
      const Tensor rows = rows_of(wide(x));
      result[2] = (out_in ? at::mm(gradient.t(), rows) : at::mm(rows.t(), gradient)).to(weight.scalar_type());
    }
    return result;
  }
};

struct WideMatmul : torch::autograd::Function<WideMatmul> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b) {
    context->save_for_backward({a, b});
    return at::matmul(wide(a), wide(b)).to(a.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list outputs) {
    const variable_list saved = context->get_saved_variables();
    const Tensor gradient = wide(outputs[0]);
    variable_list result(2);
    for (int i = 0; i < 2; ++i) {
      if (!context->needs_input_grad(static_cast<std::size_t>(i))) continue;
      const Tensor other = wide(saved[static_cast<std::size_t>(1 - i)]).transpose(-1, -2);
      const Tensor product = i == 0 ? at::matmul(gradient, other) : at::matmul(other, gradient);
      result[static_cast<std::size_t>(i)] = product.to(saved[0].scalar_type());
    }
    return result;
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
  if (!needs_widening(x)) return plain_linear(x, weight, bias, layout);
  const std::optional<Tensor> added = bias.defined() ? std::optional(bias) : std::nullopt;
  return WideLinear::apply(x, added, weight, layout == WeightLayout::out_in);
}

Tensor batched_product(const Tensor& a, const Tensor& b) {
  return needs_widening(a) ? WideMatmul::apply(a, b) : at::matmul(a, b);
}

Tensor soft_capped(const Tensor& x, double cap) {
  const Tensor bent = x.div_(cap).tanh_();
  return bent.requires_grad() ? bent * cap : bent.mul_(cap);  // backward needs tanh's result
}

}  // namespace spillway
