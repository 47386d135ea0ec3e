// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <functional>
#include <numeric>
#include <utility>

#include "spillway/state/model_config.h"

namespace spillway {
namespace {

using Shape = std::vector<std::int64_t>;

// Collects parameters; `prefix` and `block` are those of the module being walked.
class Walk {
 public:
  void enter(std::string prefix, std::int64_t block) {
    prefix_ = std::move(prefix);
    block_ = block;
  }
  void add(const std::string& name, Shape shape) { out_.push_back({prefix_ + name, std::move(shape), block_}); }

  // A torch Linear: weight [out, in].
  void linear(const std::string& name, std::int64_t in, std::int64_t out, bool bias) {
    add(name + ".weight", {out, in});
    if (bias) add(name + ".bias", {out});
  }
  // The Conv1D of GPT-2: weight [in, out].
  void conv1d(const std::string& name, std::int64_t in, std::int64_t out) {
    add(name + ".weight", {in, out});
    add(name + ".bias", {out});
  }
  void layer_norm(const std::string& name, std::int64_t size) {
    add(name + ".weight", {size});
    add(name + ".bias", {size});
  }

  std::vector<ParameterShape> take() { return std::move(out_); }

 private:
  std::vector<ParameterShape> out_;
  std::string prefix_;
  std::int64_t block_ = 0;
};

void walk_gpt2(const ModelConfig& c, Walk& walk) {
  walk.enter("transformer.", 0);
  walk.add("wte.weight", {c.vocabulary, c.hidden});
  walk.add("wpe.weight", {c.max_position, c.hidden});
  for (std::int64_t i = 0; i < c.layers; ++i) {
    walk.enter(fmt::format("transformer.h.{}.", i), i + 1);
    walk.layer_norm("ln_1", c.hidden);
    walk.conv1d("attn.c_attn", c.hidden, 3 * c.hidden);
    walk.conv1d("attn.c_proj", c.hidden, c.hidden);
    walk.layer_norm("ln_2", c.hidden);
    walk.conv1d("mlp.c_fc", c.hidden, c.intermediate);
    walk.conv1d("mlp.c_proj", c.intermediate, c.hidden);
  }
  walk.enter("transformer.", c.layers + 1);
  walk.layer_norm("ln_f", c.hidden);
}

void walk_llama_like(const ModelConfig& c, Walk& walk) {
  walk.enter("model.", 0);
  walk.add("embed_tokens.weight", {c.vocabulary, c.hidden});
  for (std::int64_t i = 0; i < c.layers; ++i) {
    walk.enter(fmt::format("model.layers.{}.", i), i + 1);
    walk.linear("self_attn.q_proj", c.hidden, c.heads * c.head_dim, c.attention_bias);
    walk.linear("self_attn.k_proj", c.hidden, c.kv_heads * c.head_dim, c.attention_bias);
    walk.linear("self_attn.v_proj", c.hidden, c.kv_heads * c.head_dim, c.attention_bias);
    walk.linear("self_attn.o_proj", c.heads * c.head_dim, c.hidden, c.attention_output_bias);
    if (c.qk_norm) {
      walk.add("self_attn.q_norm.weight", {c.head_dim});
      walk.add("self_attn.k_norm.weight", {c.head_dim});
    }
    walk.linear("mlp.gate_proj", c.hidden, c.intermediate, c.mlp_bias);
    walk.linear("mlp.up_proj", c.hidden, c.intermediate, c.mlp_bias);
    walk.linear("mlp.down_proj", c.intermediate, c.hidden, c.mlp_bias);
    walk.add("input_layernorm.weight", {c.hidden});
    walk.add("post_attention_layernorm.weight", {c.hidden});
    if (c.branch_norms) {
      walk.add("pre_feedforward_layernorm.weight", {c.hidden});
      walk.add("post_feedforward_layernorm.weight", {c.hidden});
    }
  }
  walk.enter("model.", c.layers + 1);
  walk.add("norm.weight", {c.hidden});
}

}  // namespace

std::int64_t ParameterShape::numel() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<ParameterShape> parameter_shapes(const ModelConfig& config) {
  Walk walk;
  config.family == ModelFamily::gpt2 ? walk_gpt2(config, walk) : walk_llama_like(config, walk);
  walk.enter("", config.layers + 1);
  if (!config.tied_head) walk.linear("lm_head", config.hidden, config.vocabulary, false);
  return walk.take();
}

}  // namespace spillway
