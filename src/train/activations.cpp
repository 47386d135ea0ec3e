// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/activations.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/models/generate.h"
#include "spillway/train/device_scope.h"
#include "train/recompute.h"

namespace spillway {
namespace {

// Drops each gradient when its last use is done, as the engine takes them.
class DropGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit DropGradient(std::int64_t* uses_left) : uses_left_(uses_left) {}
  void operator()(const torch::autograd::Variable& variable) override {
    if (--*uses_left_ > 0) return;
    const torch::Tensor gradient = variable.grad().contiguous();  // as the engine stages it
    variable.mutable_grad().reset();
  }

 private:
  std::int64_t* uses_left_;
};

// Takes hooks and block calls off again.
class ProfiledModel {
 public:
  ProfiledModel(CausalLM& model, bool recompute) : model_(model) {
    for (torch::Tensor& parameter : model.parameters()) {
      if (!parameter.requires_grad()) continue;
      trained_.push_back(parameter);
      std::int64_t* uses = &uses_left_[parameter.unsafeGetTensorImpl()];
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<DropGradient>(uses));
    }
    if (recompute) model.set_block_call(&call_recomputed);
  }
  ~ProfiledModel() {
    model_.set_block_call({});
    for (torch::Tensor& parameter : trained_) torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
  ProfiledModel(const ProfiledModel&) = delete;
  ProfiledModel& operator=(const ProfiledModel&) = delete;

  void count_uses(const torch::Tensor& loss) {
    for_gradient_events(loss, [this](const torch::Tensor& leaf) {
      const auto found = uses_left_.find(leaf.unsafeGetTensorImpl());
      if (found != uses_left_.end()) ++found->second;
    });
  }

 private:
  static std::vector<torch::Tensor> call_recomputed(torch::nn::Module& block, const BlockForward& forward,
                                                    const std::vector<torch::Tensor>& inputs) {
    if (!inputs.front().requires_grad()) return forward(inputs);
    auto call = c10::make_intrusive<RecomputedCall>();
    call->forward = forward;
    for (const torch::Tensor& parameter : block.parameters()) {
      if (parameter.requires_grad()) call->parameters.push_back(parameter);
    }
    call->with_same_random_numbers = [](const std::function<void()>& body) { body(); };
    return recompute_in_backward(std::move(call), inputs);
  }

  CausalLM& model_;
  std::vector<torch::Tensor> trained_;
  std::unordered_map<const void*, std::int64_t> uses_left_;
};

torch::Tensor meta_tokens(BatchShape batch) {
  return torch::empty({batch.rows, batch.tokens}, torch::TensorOptions().dtype(torch::kLong).device(torch::kMeta));
}

void check_meta(const CausalLM& model) {
  require(model.parameters().front().is_meta(), "activations are profiled on a model without memory: meta_causal_lm");
}

}  // namespace

Bytes profile_activations(CausalLM& model, const Config& config, BatchShape batch) {
  check_meta(model);
  const auto ledger = std::make_shared<MemoryLedger>(Tier::device, Bytes{-1});
  const torch::Tensor tokens = meta_tokens(batch), documents = batch.documents ? tokens : torch::Tensor();
  ProfiledModel profiled(model, config.recompute);
  model.train();
  const DeviceScope scope(ledger);
  const torch::Tensor loss = next_token_loss(model.forward(tokens, documents), tokens, batch.rows * batch.tokens);
  profiled.count_uses(loss);
  torch::autograd::backward({loss}, {torch::ones_like(loss)});
  return ledger->peak();
}

Bytes profile_evaluation(CausalLM& model, BatchShape batch) {
  check_meta(model);
  const auto ledger = std::make_shared<MemoryLedger>(Tier::device, Bytes{-1});
  const torch::Tensor tokens = meta_tokens(batch), documents = batch.documents ? tokens : torch::Tensor();
  const torch::NoGradGuard no_grad;
  model.eval();
  const DeviceScope scope(ledger);
  const torch::Tensor loss = next_token_loss_sum(model.forward(tokens, documents), tokens);
  return ledger->peak();
}

Bytes profile_generation(CausalLM& model, std::int64_t prompt, std::int64_t new_tokens) {
  check_meta(model);
  require(prompt >= 1 && new_tokens >= 1,
          "generation is profiled with at least one token of a prompt and one after it");
  const std::int64_t most = model.config().max_position, first = std::min(prompt, most);
  const std::int64_t capacity = first + std::min(new_tokens - 1, most - first);
  // A text that goes beyond the model's positions is read again from its last half.
  const bool again = new_tokens - 1 > most - first;
  const std::int64_t beginning = again ? std::max(first, most / 2) : first;
  const torch::NoGradGuard no_grad;
  const auto ledger = std::make_shared<MemoryLedger>(Tier::device, Bytes{-1});
  const DeviceScope scope(ledger);
  Decoder decoder(model, 1, capacity);
  decoder.start(meta_tokens({1, beginning})).to(torch::kFloat);  // as a draw reads them
  if (capacity == 1) return ledger->peak();
  decoder.pretend(capacity - 1);
  decoder.next(meta_tokens({1, 1})).to(torch::kFloat);
  return ledger->peak();
}

}  // namespace spillway
