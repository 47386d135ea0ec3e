// SPDX-License-Identifier: Apache-2.0
#include "models/attention.h"

#include <cmath>
#include <limits>
#include <utility>

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

// Of positions [..., length], fp32.
RotaryTables tables(const Tensor& positions, const Tensor& frequencies, torch::ScalarType type) {
  const Tensor angles = positions.unsqueeze(-1) * frequencies.to(positions.device());
  const Tensor both = at::cat({angles, angles}, -1);
  return {both.cos().to(type), both.sin().to(type)};
}

// What is added to scores, from what is seen [batch, length, length].
Tensor mask_from(const Tensor& seen, torch::ScalarType type) {
  const Tensor hidden = seen.bitwise_not().unsqueeze(1);
  return at::zeros(hidden.sizes(), hidden.options().dtype(type)).masked_fill_(hidden, lowest(type));
}

// Of any positions [batch, length], int64, for heads in between.
RotaryTables tables_at(const Tensor& positions, const Tensor& frequencies, torch::ScalarType type) {
  if (!frequencies.defined()) return {};
  const RotaryTables all = tables(positions.to(torch::kFloat), frequencies, type);
  return {all.cos.unsqueeze(1), all.sin.unsqueeze(1)};
}

// In place where autograd does not need the value that is overwritten: scores are the largest tensors of a layer.
Tensor scale(const Tensor& scores, const AttentionSettings& settings) {
  scores.mul_(settings.scale);
  return settings.softcap ? soft_capped(scores, *settings.softcap) : scores;
}

// Constants made inside an inference-mode scope could not be used by a later training step.
struct PlainTensors {
  c10::InferenceMode inference{false};
  torch::NoGradGuard no_grad;
};

}  // namespace

Tensor rotary_frequencies(const ModelConfig& config, double theta, bool scaled) {
  const Tensor exponents = at::arange(0, config.head_dim, 2, torch::kFloat) / config.head_dim;
  const Tensor frequencies = 1.0 / at::pow(torch::Scalar(theta), exponents);
  if (!scaled) return frequencies;
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
  if (window) hidden = hidden.bitwise_or_(distance >= *window);
  return at::zeros({length, length}, options).masked_fill_(hidden, lowest(c10::typeMetaToScalarType(options.dtype())));
}

bool layer_slides(const ModelConfig& config, std::int64_t layer) {
  if (!config.sliding_window) return false;
  return config.layer_slides.empty() || config.layer_slides.at(static_cast<std::size_t>(layer));
}

AttentionConstants::AttentionConstants(const ModelConfig& config) : window_(config.sliding_window) {
  const PlainTensors plain;
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    (layer_slides(config, layer) ? none_slides_ : all_slide_) = false;
  }
  if (config.family == ModelFamily::gpt2) return;
  frequencies_ = rotary_frequencies(config, config.rope_theta, /*scaled=*/true);
  if (none_slides_ || !config.sliding_rope_theta) return;
  sliding_frequencies_ = rotary_frequencies(config, *config.sliding_rope_theta, /*scaled=*/false);
}

void AttentionConstants::forget() {
  length_ = -1;
  rotary_ = sliding_rotary_ = {};
  full_.reset();
  sliding_.reset();
}

void AttentionConstants::fit(const Tensor& hidden) {
  const torch::TensorOptions options = at::TensorOptions().dtype(hidden.scalar_type()).device(hidden.device());
  const bool fits =
      length_ == hidden.size(1) && options_.dtype() == options.dtype() && options_.device() == options.device();
  if (fits) return;
  forget();
  length_ = hidden.size(1);
  options_ = options;
}

const RotaryTables& AttentionConstants::rotary(const Tensor& hidden, bool sliding) {
  fit(hidden);
  const bool own = sliding && sliding_frequencies_.defined();
  RotaryTables& kept = own ? sliding_rotary_ : rotary_;
  if (!kept.cos.defined()) {
    const PlainTensors plain;
    const Tensor positions = at::arange(length_, options_.dtype(torch::kFloat));
    kept = tables(positions, own ? sliding_frequencies_ : frequencies_, c10::typeMetaToScalarType(options_.dtype()));
  }
  return kept;
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

RotaryTables AttentionConstants::rotary_of(const BlockInputs& inputs, bool sliding) {
  const RotaryTables& given = sliding && sliding_frequencies_.defined() ? inputs.sliding_rotary : inputs.rotary;
  return given.cos.defined() ? given : rotary(inputs.hidden, sliding);
}

Tensor AttentionConstants::mask_of(const BlockInputs& inputs, bool sliding) {
  const Tensor& given = sliding ? inputs.sliding_mask : inputs.mask;
  return given.defined() ? given : mask(inputs.hidden, sliding);
}

void AttentionConstants::set_positions(BlockInputs& inputs, Tensor positions, torch::ScalarType type) const {
  const PlainTensors plain;
  inputs.rotary = tables_at(positions, frequencies_, type);
  inputs.sliding_rotary = tables_at(positions, sliding_frequencies_, type);
  inputs.positions = std::move(positions);
}

BlockInputs AttentionConstants::of_documents(const Tensor& documents, torch::ScalarType type) const {
  const PlainTensors plain;
  BlockInputs inputs;
  const Tensor order = at::arange(documents.size(1), documents.options());
  const Tensor seen = documents.unsqueeze(2).eq(documents.unsqueeze(1)).bitwise_and_(order.unsqueeze(1) >= order);
  // Widened by itself: on processors a sum that also converts makes a copy that tensors without memory do not show.
  const Tensor places = seen.to(torch::kInt).sum(-1, /*keepdim=*/false, torch::kInt).sub_(1).to(torch::kLong);
  if (!all_slide_) inputs.mask = mask_from(seen, type);
  if (!none_slides_) {
    const Tensor near = places.unsqueeze(1).gt((places - *window_).unsqueeze(2));
    inputs.sliding_mask = mask_from(near.bitwise_and(seen), type);
  }
  set_positions(inputs, places, type);
  return inputs;
}

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
              const AttentionSettings& settings, DropoutGenerator& dropout, bool training) {
  const std::int64_t shared_by = query.size(1) / key.size(1);
  const Tensor products = batched_product(query, repeat_heads(key, shared_by).transpose(-1, -2));
  const Tensor scores = scale(products, settings).add_(mask);
  const Tensor weights = at::softmax(scores, -1, torch::kFloat).to(query.scalar_type());
  const Tensor mixed =
      batched_product(dropout.apply(weights, settings.dropout, training), repeat_heads(value, shared_by));
  return mixed.transpose(1, 2).reshape({query.size(0), query.size(2), -1});
}

Tensor attend_cached(const BlockInputs& inputs, const Tensor& query, const Tensor& key, const Tensor& value,
                     const AttentionSettings& settings) {
  const std::int64_t length = query.size(2), kept = inputs.new_keys.size(2);
  inputs.new_keys.copy_(key.narrow(2, length - kept, kept));
  inputs.new_values.copy_(value.narrow(2, length - kept, kept));
  if (length > 1) return {};
  // Query heads that share a key head are rows of one product: no key is copied for each of them.
  const Tensor rows = query.reshape({query.size(0), key.size(1), -1, query.size(3)});
  const Tensor scores = scale(batched_product(rows, inputs.keys.transpose(-1, -2)), settings);
  const Tensor weights = at::softmax(scores, -1, torch::kFloat).to(query.scalar_type());
  return batched_product(weights, inputs.values).reshape({query.size(0), 1, -1});
}

}  // namespace spillway
