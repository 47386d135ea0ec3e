// SPDX-License-Identifier: Apache-2.0
#include "models/attention.h"

#include <cmath>
#include <limits>

#include "models/arithmetic.h"

namespace spillway {
namespace {

using torch::Tensor;

// The scaling by parts of Llama 3: long wavelengths are stretched by the factor, short ones kept, and those between
// blended. One fp32 operation after the other as transformers does, since angles grow with the position.
Tensor scale_by_parts(const Tensor& frequencies, const RopeScaling& rope) {
  const double context = static_cast<double>(rope.original_max_position);
  const Tensor wavelengths = 2 * M_PI / frequencies;
  const Tensor is_long = wavelengths > context / rope.low_freq_factor;
  const Tensor is_short = wavelengths < context / rope.high_freq_factor;
  const Tensor smooth = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  const Tensor stretched = at::where(is_long, frequencies / rope.factor, frequencies);
  const Tensor blended = (1 - smooth) * stretched / rope.factor + smooth * stretched;
  return at::where(is_long.logical_or(is_short), stretched, blended);
}

double lowest(torch::ScalarType type) {
  switch (type) {
    case torch::kHalf:
      return std::numeric_limits<c10::Half>::lowest();
    case torch::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::lowest();
    default:
      return std::numeric_limits<float>::lowest();
  }
}

Tensor repeat_heads(const Tensor& x, std::int64_t times) {
  if (times == 1) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), times, x.size(2), x.size(3)})
      .reshape({x.size(0), x.size(1) * times, x.size(2), x.size(3)});
}

// Constants made inside an inference-mode scope could not be used by a later training step.
struct PlainTensors {
  c10::InferenceMode inference{false};
  torch::NoGradGuard no_grad;
};

}  // namespace

Tensor rotary_frequencies(const ModelConfig& config) {
  const Tensor exponents = at::arange(0, config.head_dim, 2, torch::kFloat) / config.head_dim;
  const Tensor frequencies = 1.0 / at::pow(torch::Scalar(config.rope_theta), exponents);
  switch (config.rope.type) {
    case RopeScaling::Type::linear:
      return frequencies / config.rope.factor;
    case RopeScaling::Type::llama3:
      return scale_by_parts(frequencies, config.rope);
    case RopeScaling::Type::none:
      break;
  }
  return frequencies;
}

Tensor rotate(const Tensor& x, const RotaryTables& tables) {
  const std::int64_t half = x.size(-1) / 2;
  const Tensor turned = at::cat({-x.narrow(-1, half, x.size(-1) - half), x.narrow(-1, 0, half)}, -1);
  return (x * tables.cos) + (turned * tables.sin);
}

Tensor causal_mask(std::int64_t length, std::optional<std::int64_t> window, const torch::TensorOptions& options) {
  const Tensor positions = at::arange(length, options.dtype(torch::kLong));
  const Tensor distance = positions.unsqueeze(1) - positions;  // of a key behind its query
  Tensor hidden = distance < 0;
  if (window) hidden = hidden.logical_or_(distance >= *window);
  return at::zeros({length, length}, options).masked_fill_(hidden, lowest(c10::typeMetaToScalarType(options.dtype())));
}

AttentionConstants::AttentionConstants(const ModelConfig& config) : window_(config.sliding_window) {
  const PlainTensors plain;
  if (config.family != ModelFamily::gpt2) frequencies_ = rotary_frequencies(config);
}

void AttentionConstants::fit(const Tensor& hidden) {
  const torch::TensorOptions options = at::TensorOptions().dtype(hidden.scalar_type()).device(hidden.device());
  const bool fits =
      length_ == hidden.size(1) && options_.dtype() == options.dtype() && options_.device() == options.device();
  if (fits) return;
  length_ = hidden.size(1);
  options_ = options;
  rotary_ = {};
  full_.reset();
  sliding_.reset();
}

const RotaryTables& AttentionConstants::rotary(const Tensor& hidden) {
  fit(hidden);
  if (!rotary_.cos.defined()) {
    const PlainTensors plain;
    const Tensor positions = at::arange(length_, options_.dtype(torch::kFloat));
    const Tensor angles = positions.unsqueeze(1) * frequencies_.to(options_.device());
    const Tensor both = at::cat({angles, angles}, -1);
    rotary_ = {both.cos().to(options_.dtype()), both.sin().to(options_.dtype())};
  }
  return rotary_;
}

const Tensor& AttentionConstants::mask(const Tensor& hidden, bool sliding) {
  fit(hidden);
  Tensor& kept = sliding ? sliding_ : full_;
  if (!kept.defined()) {
    const PlainTensors plain;
    kept = causal_mask(length_, sliding ? window_ : std::nullopt, options_);
  }
  return kept;
}

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
              const AttentionSettings& settings, DropoutGenerator& dropout, bool training) {
  const std::int64_t shared_by = query.size(1) / key.size(1);
  // In place where autograd does not need the value that is overwritten: scores are the largest tensors of a layer.
  Tensor scores =
      batched_product(query, repeat_heads(key, shared_by).transpose(-1, -2)).mul_(settings.scale).add_(mask);
  const Tensor weights = at::softmax(scores, -1, torch::kFloat).to(query.scalar_type());
  const Tensor mixed =
      batched_product(dropout.apply(weights, settings.dropout, training), repeat_heads(value, shared_by));
  return mixed.transpose(1, 2).reshape({query.size(0), query.size(2), -1});
}

}  // namespace spillway
