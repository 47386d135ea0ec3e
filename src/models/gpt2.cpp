// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "models/attention.h"
#include "models/families.h"
#include "models/layers.h"

namespace spillway {
namespace {

using torch::Tensor;

// What the layers of one model share.
struct Gpt2Shared {
  const ModelConfig& config;
  torch::TensorOptions options;
  std::shared_ptr<DropoutGenerator> dropout;
  std::shared_ptr<AttentionConstants> constants;
};

class Gpt2Attention : public torch::nn::Module {
 public:
  Gpt2Attention(const Gpt2Shared& shared, std::int64_t index)
      : heads_(shared.config.heads),
        settings_{.scale = 1, .dropout = shared.config.attention_dropout},
        residual_dropout_(shared.config.residual_dropout),
        dropout_(shared.dropout) {
    const ModelConfig& config = shared.config;
    if (config.scale_attention) settings_.scale = 1 / std::sqrt(static_cast<double>(config.head_dim));
    if (config.scale_attention_by_inverse_layer) settings_.scale /= static_cast<double>(index + 1);
    c_attn_ = register_module("c_attn", std::make_shared<Dense>(config.hidden, 3 * config.hidden, true,
                                                                WeightLayout::in_out, shared.options));
    c_proj_ = register_module(
        "c_proj", std::make_shared<Dense>(config.hidden, config.hidden, true, WeightLayout::in_out, shared.options));
  }

  // `inputs` are the layer's, whose hidden states `x` comes from.
  Tensor forward(const Tensor& x, const BlockInputs& inputs, AttentionConstants& constants) {
    const std::vector<Tensor> parts = c_attn_->forward(x).split(x.size(-1), -1);
    const Tensor query = by_head(parts[0]), key = by_head(parts[1]), value = by_head(parts[2]);
    Tensor mixed;
    if (inputs.keys.defined()) mixed = attend_cached(inputs, query, key, value, settings_);
    if (!mixed.defined()) {
      const Tensor mask = constants.mask_of(inputs, /*sliding=*/false);
      mixed = attend(query, key, value, mask, settings_, *dropout_, is_training());
    }
    return dropout_->apply(c_proj_->forward(mixed), residual_dropout_, is_training());
  }

 private:
  Tensor by_head(const Tensor& x) const { return x.view({x.size(0), x.size(1), heads_, -1}).transpose(1, 2); }

  std::int64_t heads_;
  AttentionSettings settings_;
  double residual_dropout_;
  std::shared_ptr<DropoutGenerator> dropout_;
  std::shared_ptr<Dense> c_attn_, c_proj_;
};

class Gpt2Mlp : public torch::nn::Module {
 public:
  explicit Gpt2Mlp(const Gpt2Shared& shared)
      : activation_(shared.config.activation),
        residual_dropout_(shared.config.residual_dropout),
        dropout_(shared.dropout) {
    const ModelConfig& config = shared.config;
    c_fc_ = register_module("c_fc", std::make_shared<Dense>(config.hidden, config.intermediate, true,
                                                            WeightLayout::in_out, shared.options));
    c_proj_ = register_module("c_proj", std::make_shared<Dense>(config.intermediate, config.hidden, true,
                                                                WeightLayout::in_out, shared.options));
  }

  Tensor forward(const Tensor& x) {
    const Tensor inner = activate(activation_, c_fc_->forward(x));
    return dropout_->apply(c_proj_->forward(inner), residual_dropout_, is_training());
  }

 private:
  Activation activation_;
  double residual_dropout_;
  std::shared_ptr<DropoutGenerator> dropout_;
  std::shared_ptr<Dense> c_fc_, c_proj_;
};

class Gpt2Layer : public torch::nn::Module {
 public:
  Gpt2Layer(const Gpt2Shared& shared, std::int64_t index) : constants_(shared.constants) {
    const ModelConfig& config = shared.config;
    ln_1_ = register_module("ln_1", std::make_shared<LayerNorm>(config.hidden, config.norm_eps, shared.options));
    attn_ = register_module("attn", std::make_shared<Gpt2Attention>(shared, index));
    ln_2_ = register_module("ln_2", std::make_shared<LayerNorm>(config.hidden, config.norm_eps, shared.options));
    mlp_ = register_module("mlp", std::make_shared<Gpt2Mlp>(shared));
  }

  Tensor forward(const BlockInputs& inputs) {
    const Tensor& x = inputs.hidden;
    const Tensor attended = x + attn_->forward(ln_1_->forward(x), inputs, *constants_);
    return attended + mlp_->forward(ln_2_->forward(attended));
  }

 private:
  std::shared_ptr<AttentionConstants> constants_;
  std::shared_ptr<LayerNorm> ln_1_, ln_2_;
  std::shared_ptr<Gpt2Attention> attn_;
  std::shared_ptr<Gpt2Mlp> mlp_;
};

class Gpt2 : public CausalLM {
 public:
  Gpt2(const ModelConfig& config, const torch::TensorOptions& options) : CausalLM(config) {
    const Gpt2Shared shared{this->config(), options, dropout(), constants()};
    auto body = register_module("transformer", std::make_shared<torch::nn::Module>());
    wte_ = body->register_module("wte", std::make_shared<Embedding>(config.vocabulary, config.hidden, options));
    wpe_ = body->register_module("wpe", std::make_shared<Embedding>(config.max_position, config.hidden, options));
    add_block("embedding", {wte_, wpe_}, [this](const BlockInputs& inputs) { return embed(inputs); });
    auto layers = body->register_module("h", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < config.layers; ++i) {
      auto layer = std::make_shared<Gpt2Layer>(shared, i);
      layers->push_back(layer);
      add_block("layers." + std::to_string(i), {layer},
                [layer = layer.get()](const BlockInputs& inputs) { return layer->forward(inputs); });
    }
    norm_ = body->register_module("ln_f", std::make_shared<LayerNorm>(config.hidden, config.norm_eps, options));
    head_ = wte_;
    if (!config.tied_head) {
      head_ = register_module("lm_head", std::make_shared<Embedding>(config.vocabulary, config.hidden, options));
    }
    add_block("head", {norm_, head_}, [this](const BlockInputs& inputs) { return logits(inputs.hidden); });
    name_blocks();
  }

 private:
  Tensor embed(const BlockInputs& inputs) {
    const Tensor words = wte_->forward(inputs.hidden);
    // Where positions are the first rows in order, a view of the table does what a look-up would.
    const Tensor places =
        inputs.positions.defined() ? wpe_->forward(inputs.positions) : wpe_->weight.narrow(0, 0, inputs.hidden.size(1));
    const Tensor hidden = words + places;
    return dropout()->apply(hidden, config().embedding_dropout, is_training());
  }

  Tensor logits(const Tensor& x) { return linear(norm_->forward(x), head_->weight, /*bias=*/{}, WeightLayout::out_in); }

  std::shared_ptr<Embedding> wte_, wpe_, head_;
  std::shared_ptr<LayerNorm> norm_;
};

}  // namespace

std::shared_ptr<CausalLM> make_gpt2(const ModelConfig& config, const torch::TensorOptions& options) {
  return std::make_shared<Gpt2>(config, options);
}

}  // namespace spillway
