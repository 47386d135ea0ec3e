// SPDX-License-Identifier: Apache-2.0
#include "spillway/models/causal_lm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <cmath>
#include <unordered_map>

#include "models/attention.h"
#include "models/block_inputs.h"
#include "models/dropout.h"
#include "models/families.h"
#include "models/scalar_type.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// Groups modules that stand in different places of the model, so that one Module's parameters() are those of a block.
class BlockParts : public torch::nn::Module {
 public:
  explicit BlockParts(const std::vector<std::shared_ptr<torch::nn::Module>>& parts) {
    for (const auto& part : parts) register_module(std::to_string(children().size()), part);
  }
};

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

void draw(torch::Tensor& parameter, const std::string& name, const ModelConfig& config, at::Generator& generator) {
  if (ends_with(name, ".bias")) {
    parameter.zero_();
  } else if (parameter.dim() == 1) {
    parameter.fill_(config.norm_plus_one ? 0 : 1);  // a norm's weight
  } else {
    // GPT-2: every layer adds two branches to the residual stream, whose variance would grow with their number.
    const bool ends_branch = config.family == ModelFamily::gpt2 && ends_with(name, ".c_proj.weight");
    const double branches = ends_branch ? 2.0 * static_cast<double>(config.layers) : 1.0;
    const double deviation = config.initializer_range / std::sqrt(branches);
    if (parameter.scalar_type() == torch::kFloat) {
      parameter.normal_(0, deviation, generator);
    } else {
      parameter.copy_(at::empty(parameter.sizes(), torch::kFloat).normal_(0, deviation, generator));
    }
    if (config.padding_token && ends_with(name, ".embed_tokens.weight")) parameter[*config.padding_token].zero_();
  }
}

}  // namespace

CausalLM::CausalLM(ModelConfig config)
    : torch::nn::Module("CausalLM"),
      config_(std::move(config)),
      dropout_(std::make_shared<DropoutGenerator>()),
      constants_(std::make_shared<AttentionConstants>(config_)) {}

CausalLM::~CausalLM() = default;

torch::Tensor CausalLM::forward(const torch::Tensor& tokens, const torch::Tensor& documents) {
  const bool fits = tokens.dim() == 2 && tokens.scalar_type() == torch::kLong && tokens.size(1) > 0;
  if (!fits) {
    throw InvalidArgument(fmt::format("A model's input is tokens [batch, length] of type int64; got {} of type {}.",
                                      c10::str(tokens.sizes()), c10::toString(tokens.scalar_type())));
  }
  if (tokens.size(1) > config_.max_position) {
    throw InvalidArgument(
        fmt::format("A row of {} tokens is longer than the {} positions of the model's "
                    "configuration: cut the rows, or use a model with more positions.",
                    tokens.size(1), config_.max_position));
  }
  BlockInputs inputs;
  if (documents.defined()) {
    if (documents.sizes() != tokens.sizes() || documents.scalar_type() != torch::kLong) {
      throw InvalidArgument(
          fmt::format("The documents of tokens {} have the same shape and type int64; got {} of type {}.",
                      c10::str(tokens.sizes()), c10::str(documents.sizes()), c10::toString(documents.scalar_type())));
    }
    inputs = constants_->of_documents(documents.to(tokens.device()), parameters().front().scalar_type());
  }
  inputs.hidden = tokens;
  return run(std::move(inputs), {});
}

torch::Tensor CausalLM::run(BlockInputs inputs,
                            const std::function<void(std::size_t block, BlockInputs& inputs)>& before) {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (before) before(i, inputs);
    const PackedInputs packed = pack(inputs);
    const BlockForward forward = [body = &bodies_[i],
                                  present = packed.present](const std::vector<torch::Tensor>& tensors) {
      return std::vector{(*body)(unpack(tensors, present))};
    };
    inputs.hidden =
        (block_call_ ? block_call_(*blocks_[i].module, forward, packed.tensors) : forward(packed.tensors)).at(0);
  }
  return inputs.hidden;
}

void CausalLM::add_block(std::string name, std::vector<std::shared_ptr<torch::nn::Module>> parts, BlockBody body) {
  auto module = parts.size() == 1 ? parts.front() : std::make_shared<BlockParts>(parts);
  blocks_.push_back({.name = std::move(name), .module = module.get(), .parameters = {}});
  block_modules_.push_back(std::move(module));
  bodies_.push_back(std::move(body));
}

void CausalLM::name_blocks() {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : named_parameters()) names[item.value().unsafeGetTensorImpl()] = item.key();
  for (Block& block : blocks_) {
    block.parameters.clear();
    for (const torch::Tensor& parameter : block.module->parameters()) {
      block.parameters.push_back(names.at(parameter.unsafeGetTensorImpl()));
    }
  }
}

bool CausalLM::uses_dropout() const {
  if (lora_ && lora_->dropout > 0) return true;
  return config_.embedding_dropout > 0 || config_.attention_dropout > 0 || config_.residual_dropout > 0;
}

void CausalLM::forget_tables() {
  constants_->forget();
}

void CausalLM::set_dropout_seed(std::uint64_t seed) {
  dropout_->set_seed(seed);
}

torch::Tensor CausalLM::dropout_state() const {
  return dropout_->state(parameters().front().device());
}

void CausalLM::set_dropout_state(const torch::Tensor& state) {
  dropout_->set_state(parameters().front().device(), state);
}

namespace {

std::shared_ptr<CausalLM> make_on(torch::Device device, const ModelConfig& config, DType dtype) {
  const torch::TensorOptions options = torch::TensorOptions().dtype(to_scalar_type(dtype)).device(device);
  return config.family == ModelFamily::gpt2 ? make_gpt2(config, options) : make_llama(config, options);
}

}  // namespace

std::shared_ptr<CausalLM> empty_causal_lm(const ModelConfig& config, DType dtype) {
  return make_on(torch::kCPU, config, dtype);
}

std::shared_ptr<CausalLM> meta_causal_lm(const ModelConfig& config, DType dtype) {
  return make_on(torch::kMeta, config, dtype);
}

std::shared_ptr<CausalLM> make_causal_lm(const ModelConfig& config, std::uint64_t seed, DType dtype) {
  std::shared_ptr<CausalLM> model = empty_causal_lm(config, dtype);
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (auto& item : model->named_parameters()) draw(item.value(), item.key(), config, generator);
  return model;
}

}  // namespace spillway
