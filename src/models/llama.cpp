// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "models/attention.h"
#include "models/families.h"
#include "models/layers.h"

namespace spillway {
namespace {

using torch::Tensor;

// What the layers of one model share.
struct LlamaShared {
  const ModelConfig& config;
  torch::TensorOptions options;
  std::shared_ptr<DropoutGenerator> dropout;
  std::shared_ptr<AttentionConstants> constants;

  std::shared_ptr<Dense> dense(std::int64_t in, std::int64_t out, bool bias) const {
    return std::make_shared<Dense>(in, out, bias, WeightLayout::out_in, options);
  }
  std::shared_ptr<RmsNorm> norm(std::int64_t width) const {
    return std::make_shared<RmsNorm>(width, config.norm_eps, config.norm_plus_one, options);
  }
};

AttentionSettings attention_settings(const ModelConfig& config) {
  const auto scale = static_cast<double>(config.query_pre_attn_scalar.value_or(config.head_dim));
  return {.scale = 1 / std::sqrt(scale), .dropout = config.attention_dropout, .softcap = config.attention_softcap};
}

class LlamaAttention : public torch::nn::Module {
 public:
  explicit LlamaAttention(const LlamaShared& shared)
      : head_dim_(shared.config.head_dim), settings_(attention_settings(shared.config)), dropout_(shared.dropout) {
    const ModelConfig& config = shared.config;
    const std::int64_t query_width = config.heads * head_dim_, key_width = config.kv_heads * head_dim_;
    q_proj_ = register_module("q_proj", shared.dense(config.hidden, query_width, config.attention_bias));
    k_proj_ = register_module("k_proj", shared.dense(config.hidden, key_width, config.attention_bias));
    v_proj_ = register_module("v_proj", shared.dense(config.hidden, key_width, config.attention_bias));
    o_proj_ = register_module("o_proj", shared.dense(query_width, config.hidden, config.attention_output_bias));
    if (!config.qk_norm) return;
    q_norm_ = register_module("q_norm", shared.norm(head_dim_));
    k_norm_ = register_module("k_norm", shared.norm(head_dim_));
  }

  // `inputs` are the layer's, whose hidden states `x` comes from.
  Tensor forward(const Tensor& x, const BlockInputs& inputs, AttentionConstants& constants, bool slides) {
    const RotaryTables rotary = constants.rotary_of(inputs, slides);
    const Tensor query = rotate(by_head(q_proj_->forward(x), q_norm_), rotary);
    const Tensor key = rotate(by_head(k_proj_->forward(x), k_norm_), rotary);
    const Tensor value = by_head(v_proj_->forward(x), nullptr);
    Tensor mixed;
    if (inputs.keys.defined()) mixed = attend_cached(inputs, query, key, value, settings_);
    if (!mixed.defined()) {
      const Tensor mask = constants.mask_of(inputs, slides);
      mixed = attend(query, key, value, mask, settings_, *dropout_, is_training());
    }
    return o_proj_->forward(mixed);
  }

 private:
  Tensor by_head(const Tensor& x, const std::shared_ptr<RmsNorm>& norm) const {
    const Tensor heads = x.view({x.size(0), x.size(1), -1, head_dim_});
    return (norm ? norm->forward(heads) : heads).transpose(1, 2);
  }

  std::int64_t head_dim_;
  AttentionSettings settings_;
  std::shared_ptr<DropoutGenerator> dropout_;
  std::shared_ptr<Dense> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<RmsNorm> q_norm_, k_norm_;
};

class LlamaMlp : public torch::nn::Module {
 public:
  explicit LlamaMlp(const LlamaShared& shared) : activation_(shared.config.activation) {
    const ModelConfig& config = shared.config;
    gate_proj_ = register_module("gate_proj", shared.dense(config.hidden, config.intermediate, config.mlp_bias));
    up_proj_ = register_module("up_proj", shared.dense(config.hidden, config.intermediate, config.mlp_bias));
    down_proj_ = register_module("down_proj", shared.dense(config.intermediate, config.hidden, config.mlp_bias));
  }

  Tensor forward(const Tensor& x) {
    // One after the other: the order in which a product's factors are computed is the compiler's, and with it would be
    // that of the gradients.
    const Tensor gate = activate(activation_, gate_proj_->forward(x));
    return down_proj_->forward(gate * up_proj_->forward(x));
  }

 private:
  Activation activation_;
  std::shared_ptr<Dense> gate_proj_, up_proj_, down_proj_;
};

class LlamaLayer : public torch::nn::Module {
 public:
  LlamaLayer(const LlamaShared& shared, std::int64_t index) : constants_(shared.constants) {
    const ModelConfig& config = shared.config;
    slides_ = layer_slides(config, index);
    self_attn_ = register_module("self_attn", std::make_shared<LlamaAttention>(shared));
    mlp_ = register_module("mlp", std::make_shared<LlamaMlp>(shared));
    input_layernorm_ = register_module("input_layernorm", shared.norm(config.hidden));
    post_attention_layernorm_ = register_module("post_attention_layernorm", shared.norm(config.hidden));
    if (!config.branch_norms) return;
    pre_feedforward_layernorm_ = register_module("pre_feedforward_layernorm", shared.norm(config.hidden));
    post_feedforward_layernorm_ = register_module("post_feedforward_layernorm", shared.norm(config.hidden));
  }

  Tensor forward(const BlockInputs& inputs) {
    const Tensor& x = inputs.hidden;
    const Tensor mixed = self_attn_->forward(input_layernorm_->forward(x), inputs, *constants_, slides_);
    if (!pre_feedforward_layernorm_) {
      const Tensor attended = x + mixed;
      return attended + mlp_->forward(post_attention_layernorm_->forward(attended));
    }
    const Tensor attended = x + post_attention_layernorm_->forward(mixed);
    const Tensor bent = mlp_->forward(pre_feedforward_layernorm_->forward(attended));
    return attended + post_feedforward_layernorm_->forward(bent);
  }

 private:
  bool slides_ = false;
  std::shared_ptr<AttentionConstants> constants_;
  std::shared_ptr<LlamaAttention> self_attn_;
  std::shared_ptr<LlamaMlp> mlp_;
  std::shared_ptr<RmsNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<RmsNorm> pre_feedforward_layernorm_, post_feedforward_layernorm_;  // with branch_norms alone
};

// What embeddings are multiplied by, rounded as transformers does: to fp32, then to their type.
std::optional<double> embedding_scale(const ModelConfig& config, torch::ScalarType type) {
  if (!config.scale_embedding) return std::nullopt;
  const auto scale = static_cast<float>(std::sqrt(static_cast<double>(config.hidden)));
  return at::scalar_tensor(scale, torch::kFloat).to(type).item().toDouble();
}

class Llama : public CausalLM {
 public:
  Llama(const ModelConfig& config, const torch::TensorOptions& options) : CausalLM(config) {
    const LlamaShared shared{this->config(), options, dropout(), constants()};
    auto body = register_module("model", std::make_shared<torch::nn::Module>());
    auto embedding = std::make_shared<Embedding>(config.vocabulary, config.hidden, options, config.padding_token);
    body->register_module("embed_tokens", embedding);
    add_block("embedding", {embedding},
              [table = embedding.get(),
               scale = embedding_scale(config, c10::typeMetaToScalarType(options.dtype()))](const BlockInputs& inputs) {
                const Tensor vectors = table->forward(inputs.hidden);
                return scale ? vectors.mul_(*scale) : vectors;
              });
    auto layers = body->register_module("layers", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < config.layers; ++i) {
      auto layer = std::make_shared<LlamaLayer>(shared, i);
      layers->push_back(layer);
      add_block("layers." + std::to_string(i), {layer},
                [layer = layer.get()](const BlockInputs& inputs) { return layer->forward(inputs); });
    }
    norm_ = body->register_module("norm", shared.norm(config.hidden));
    head_ = embedding;
    if (!config.tied_head) {
      head_ = register_module("lm_head", std::make_shared<Embedding>(config.vocabulary, config.hidden, options));
    }
    add_block("head", {norm_, head_}, [this](const BlockInputs& inputs) { return logits(inputs.hidden); });
    name_blocks();
  }

 private:
  Tensor logits(const Tensor& x) {
    const Tensor plain = linear(norm_->forward(x), head_->weight, /*bias=*/{}, WeightLayout::out_in);
    return config().logit_softcap ? soft_capped(plain, *config().logit_softcap) : plain;
  }

  std::shared_ptr<RmsNorm> norm_;
  std::shared_ptr<Embedding> head_;
};

}  // namespace

std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const torch::TensorOptions& options) {
  return std::make_shared<Llama>(config, options);
}

}  // namespace spillway
