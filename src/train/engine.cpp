// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "spillway/core/error.h"
#include "train/engine_impl.h"

namespace spillway {

std::string_view to_string(StepStatus status) {
  switch (status) {
    case StepStatus::updated:
      return "updated";
    case StepStatus::not_finite:
      return "not_finite";
    case StepStatus::empty:
      return "empty";
  }
  return "unknown";
}

// ---- the public face -----------------------------------------------------------------------------------------------

Engine::Engine(torch::nn::Module& model, Config config, EngineOptions options)
    : impl_(std::make_unique<Impl>(model, std::move(config), std::move(options))) {
  for (const auto& model : impl_->causal_lms) model->set_block_call(block_call(), /*newer_weights=*/true);
}

Engine::~Engine() = default;

BlockCall Engine::block_call() {
  return [this](torch::nn::Module& block, const BlockForward& forward, const std::vector<torch::Tensor>& inputs) {
    if (impl_->config.recompute) {
      return call_recomputed(block, forward, inputs, inputs.empty() ? 0 : rows_of(inputs.front()));
    }
    const BlockScope scope(*this, block, inputs.empty() ? 0 : rows_of(inputs.front()));
    return forward(inputs);
  };
}

namespace {

void check_loss(const torch::Tensor& loss) {
  require(loss.defined() && loss.numel() == 1, "backward needs a loss of one element");
  require(loss.requires_grad(), "backward needs a loss that depends on a parameter that requires a gradient");
  require(
      loss.scalar_type() == torch::kFloat || loss.scalar_type() == torch::kDouble,
      fmt::format("the loss is {}: compute it in fp32 (for example from logits.to(torch::kFloat)), or the weights of "
                  "micro-batches and the loss scale would be rounded to its type",
                  c10::toString(loss.scalar_type())));
}

}  // namespace

void Engine::backward(const torch::Tensor& loss, BackwardOptions options) {
  impl_->check_usable();
  if (impl_->runtime->ranks_added()) {  // on all ranks alike, and nothing has happened yet: the step may end
    throw StateError(
        "a backward after the one that was said to be the step's last: with reduce_last_only the ranks have added "
        "their gradients by then; step() comes next");
  }
  impl_->together([&] { add_backward(loss, options); });
}

void Engine::add_backward(const torch::Tensor& loss, const BackwardOptions& options) {
  const bool nothing = impl_->ranks != nullptr && options.weight == 0;
  if (!nothing) check_loss(loss);
  require(std::isfinite(options.weight) && options.weight >= 0,
          fmt::format("a micro-batch's weight is {}; expected a finite number, zero or more", options.weight));
  if (impl_->micro_batches == 0) impl_->first_weight_before = impl_->first_weight;
  const std::int64_t number = ++impl_->micro_batches;
  const bool last = options.last.value_or(impl_->config.accumulation > 0 && number >= impl_->config.accumulation);
  if (!options.last && impl_->config.accumulation == 0 && !std::exchange(impl_->said_updates_wait, true)) {
    log(impl_->options.log, LogLevel::info,
        "neither backward(.last) nor accumulation says which micro-batch ends a step: its norm waits for step()");
  }
  Impl::MicroBatch all{options.weight, options.weight, last};
  if (impl_->ranks != nullptr) {
    const bool alone = impl_->config.reduce_last_only && !last;
    auto order = nothing || alone ? std::vector<std::int64_t>() : impl_->order_of_gradients(loss);
    if (impl_->config.reduce_last_only && last) order = impl_->with_earlier(std::move(order));
    all = impl_->agree_micro_batch(options.weight, last, order);
  }
  if (all.weight == 0) return;
  const double first = impl_->first_weight == 0 ? all.first_weight : impl_->first_weight;
  impl_->run_backward(nothing ? torch::Tensor() : loss, impl_->scaler.scale() * options.weight / first, all.last);
  impl_->first_weight = first;
  impl_->weight_sum += all.weight;
}

StepResult Engine::step() {
  impl_->check_usable();
  return impl_->together([this] { return take_step(); });
}

void Engine::discard_step() {
  Impl& s = *impl_;
  s.check_usable();
  const TorchDeviceScope device(s.config.device);
  s.together([&s] { s.runtime->wait_discard_gradients(); });
  s.undo_step();
}

StepResult Engine::take_step() {
  Impl& s = *impl_;
  const TorchDeviceScope on_device(s.config.device);
  if (s.micro_batches == 0) throw StateError("step() needs a backward() before it in this step");
  const std::int64_t begin = Trace::now();
  s.set_learning_rates();
  s.check_parameters();
  if (s.weight_sum > 0) s.runtime->wait_agree_gradients();
  std::vector<std::size_t> updated;
  for (std::size_t i = 0; i < s.plan.trainable.size(); ++i) {
    if (s.runtime->has_gradient(static_cast<std::int64_t>(i))) updated.push_back(i);
  }
  if (s.weight_sum == 0 || updated.empty()) return s.finish_step(StepStatus::empty, 0);
  StepDecision decision;
  try {
    decision = s.schedule->step({s.grad_scale(), s.config.clip_norm});
    if (decision.finite) s.wait_for_ungated_chunks(updated);
  } catch (const std::exception& error) {
    s.failure = error.what();
    s.forget_step();
    throw;
  }
  if (!decision.finite) return s.skip_not_finite(decision.grad_norm);
  s.scaler.update(true);
  if (s.updates == 0) s.list_unused(updated);
  for (std::size_t i : updated) {
    s.plan.trainable[i].tensor.unsafeGetTensorImpl()->bump_version();
    s.versions[i] = s.plan.trainable[i].tensor._version();
  }
  s.gated.assign(s.gated.size(), false);
  const StepResult result = s.finish_step(StepStatus::updated, decision.grad_norm);
  s.machine->trace().span(s.engine_track, s.machine->trace().label("step"), begin, Trace::now(), 0, result.step);
  return result;
}

const Config& Engine::config() const {
  return impl_->config;
}

MemoryUsage Engine::memory_in_use(Tier tier) const {
  return impl_->machine->ledger(tier)->used();
}

EngineSummary Engine::summary() const {
  EngineSummary out;
  out.plan = impl_->plan.memory;
  const auto device = impl_->machine->ledger(Tier::device);
  out.device_at_peak = device->usage_at_peak();
  out.device_at_peak[MemoryUse::activations] += torch_memory_peak(impl_->config.device);
  out.device_capacity = device->capacity();
  out.device_peak = impl_->device_peak();
  out.host_peak = impl_->machine->ledger(Tier::pinned)->peak() + impl_->machine->ledger(Tier::host)->peak();
  out.low_memory_accumulation = impl_->config.low_memory_accumulation && impl_->config.precision != DType::f32;
  out.lanes = impl_->machine->trace().totals();
  return out;
}

void Engine::write_trace(const std::filesystem::path& file) const {
  impl_->machine->trace().write_chrome_json(file);
}

MemoryPlan plan_memory(const torch::nn::Module& model, const Config& config, const EngineOptions& options) {
  return make_engine_plan(model, config, options).memory;
}

}  // namespace spillway
