// SPDX-License-Identifier: Apache-2.0
#include "train/engine_impl.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "spillway/core/error.h"
#include "spillway/core/nearest.h"
#include "spillway/train/lr_schedule.h"

namespace spillway {
namespace {

MachineOptions machine_options(const Config& config, const EngineOptions& options) {
  MachineOptions out;
  out.device = config.device;
  out.host_memory = config.host_memory;
  out.threads = config.threads > 0 ? config.threads : std::max(1, available_cores() / 2);
  out.trace_events = options.trace_events;
  out.delay = options.delay;
  return out;
}

// 1, 2, 4, 8, ...: how often a repeated warning is worth a line.
bool worth_a_line(std::int64_t count) {
  return (count & (count - 1)) == 0;
}

}  // namespace

Engine::Impl::Impl(torch::nn::Module& m, Config c, EngineOptions o)
    : model(m),
      causal_lm(dynamic_cast<CausalLM*>(&m)),
      config(std::move(c)),
      options(std::move(o)),
      plan(make_engine_plan(m, config)),
      base_hyperparameters(config.group_hyperparameters()) {
  check_fits(plan, config);
  machine = make_emulated_machine(machine_options(config, options));
  runtime = std::make_unique<Runtime>(*machine, *plan.layout, plan.spec, config.optimizer, base_hyperparameters);
  schedule = plan.schedule->make(*runtime);
  gated.assign(plan.trainable.size(), false);
  rows.assign(plan.trainable.size(), 0);
  forward_track = machine->trace().track("forward");
  engine_track = machine->trace().track("engine");
  set_hooks();
  move_parameters();
  device_scope = std::make_unique<DeviceScope>(machine->ledger(Tier::device));
}

Engine::Impl::~Impl() {
  remove_hooks();
  if (causal_lm != nullptr) causal_lm->set_block_call({});
  device_scope.reset();
  try {
    runtime->wait_all();
    for (const auto* list : {&plan.trainable, &plan.frozen}) {
      for (const ModelParameter& parameter : *list) move_to_ordinary_memory(parameter.tensor);
    }
  } catch (const std::exception& error) {
    // A failed transfer or an exhausted host: the weights cannot be given back whole, and the pool goes away.
    log(options.log, LogLevel::error,
        fmt::format("the module's weights are lost, its engine ended with: {}", error.what()));
  }
}

void Engine::Impl::move_parameters() {
  const std::int64_t size = size_of(config.precision);
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    const torch::Tensor& tensor = plan.trainable[i].tensor;
    move_to(tensor, runtime->store().working().slice({plan.layout->offset(static_cast<std::int64_t>(i)) * size},
                                                     {tensor.numel() * size}));
    runtime->load_masters(static_cast<std::int64_t>(i));
  }
  std::int64_t offset = 0;
  for (const ModelParameter& parameter : plan.frozen) {
    const std::int64_t count = parameter.tensor.numel();
    move_to(parameter.tensor, runtime->store().frozen().slice({offset * size}, {count * size}));
    offset += (count + kGrainElements - 1) / kGrainElements * kGrainElements;
  }
}

// ---- gradients -----------------------------------------------------------------------------------------------------

namespace {

/// Called by LibTorch once a parameter's gradient of one backward is complete.
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientHook(std::function<void()> call) : call_(std::move(call)) {}
  void operator()(const torch::autograd::Variable&) override { call_(); }

 private:
  std::function<void()> call_;
};

}  // namespace

void Engine::Impl::set_hooks() {
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    torch::Tensor& tensor = plan.trainable[i].tensor;
    tensor.mutable_grad().reset();
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<GradientHook>([this, i] { on_gradient(static_cast<std::int64_t>(i)); }));
  }
}

void Engine::Impl::remove_hooks() noexcept {
  for (const ModelParameter& parameter : plan.trainable) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
  }
}

void Engine::Impl::on_gradient(std::int64_t index) {
  const ModelParameter& parameter = plan.trainable[static_cast<std::size_t>(index)];
  if (!in_backward) {
    throw StateError(fmt::format(
        "parameter {} got a gradient outside Engine::backward: call engine.backward(loss) instead of loss.backward()",
        parameter.name));
  }
  torch::Tensor& slot = const_cast<torch::Tensor&>(parameter.tensor).mutable_grad();
  require(slot.layout() == torch::kStrided,
          fmt::format("the gradient of {} is sparse, which is not supported: use a dense embedding", parameter.name));
  const torch::NoGradGuard no_grad;
  const torch::Tensor gradient = slot.contiguous();
  if (gradient.numel() > 0) {
    schedule->gradient_ready({index, static_cast<const std::byte*>(gradient.const_data_ptr())});
    any_gradient = true;
  }
  slot.reset();
  // Backward multiplies twice: for the gradients of inputs and of weights.
  pace(4.0 * static_cast<double>(parameter.tensor.numel()) *
       static_cast<double>(rows[static_cast<std::size_t>(index)]));
}

void Engine::Impl::run_backward(const torch::Tensor& loss, double seed, bool last) {
  const std::int64_t begin = Trace::now();
  schedule->begin_backward(last);
  in_backward = true;
  try {
    torch::autograd::backward({loss}, {torch::full_like(loss, seed)});
    schedule->end_backward();
  } catch (...) {
    // A part of this micro-batch's gradients is in the sums, so the step's sums are worth nothing.
    in_backward = false;
    for (ModelParameter& parameter : plan.trainable) parameter.tensor.mutable_grad().reset();
    schedule->abandon_backward();
    runtime->wait_discard_gradients();
    micro_batches = 0;
    weight_sum = 0;
    any_gradient = false;
    throw;
  }
  in_backward = false;
  machine->trace().span(engine_track, machine->trace().label("backward"), begin, Trace::now());
}

// ---- the step ------------------------------------------------------------------------------------------------------

void Engine::Impl::set_learning_rates() {
  const double factor = lr_factor(config.lr_schedule, updates);
  for (std::size_t g = 0; g < base_hyperparameters.size(); ++g) {
    runtime->hyperparameters()[g].lr = base_hyperparameters[g].lr * factor;
  }
}

void Engine::Impl::warn_not_finite() {
  if (!worth_a_line(++not_finite)) return;
  std::string culprits;
  for (const std::string& text : runtime->describe_non_finite(3)) culprits += (culprits.empty() ? "" : "; ") + text;
  log(options.log, LogLevel::warning,
      fmt::format("step skipped, nothing changed: gradients are not finite: {} ({} such steps so far)", culprits,
                  not_finite));
}

void Engine::Impl::wait_for_ungated_chunks() {
  for (std::size_t c = 0; c < plan.layout->chunks().size(); ++c) {
    const auto segments = plan.layout->chunk_segments(static_cast<std::int64_t>(c));
    const bool all_gated = std::all_of(segments.begin(), segments.end(), [&](const Segment& segment) {
      return gated[static_cast<std::size_t>(segment.parameter)];
    });
    if (!all_gated) runtime->wait_parameters(static_cast<std::int64_t>(c));
  }
}

StepResult Engine::Impl::finish_step(StepStatus status, double norm) {
  StepResult result;
  result.status = status;
  result.grad_norm = norm;
  result.lr = runtime->hyperparameters()[0].lr;
  if (status == StepStatus::updated) {
    ++updates;
  } else {
    ++skipped;
    runtime->wait_discard_gradients();
  }
  result.step = updates;
  result.skipped = skipped;
  result.device_peak = machine->ledger(Tier::device)->peak();
  result.host_peak = machine->ledger(Tier::pinned)->peak() + machine->ledger(Tier::host)->peak();
  micro_batches = 0;
  weight_sum = 0;
  any_gradient = false;
  return result;
}

// ---- the gate ------------------------------------------------------------------------------------------------------

GatedBlock& Engine::Impl::gated_block(const torch::nn::Module& block) {
  const auto found = blocks.find(&block);
  if (found != blocks.end()) return found->second;
  GatedBlock made;
  made.index = static_cast<std::int64_t>(blocks.size());
  made.label = machine->trace().label("forward block");
  std::unordered_map<const void*, std::int64_t> index_of;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    index_of.emplace(plan.trainable[i].tensor.unsafeGetTensorImpl(), static_cast<std::int64_t>(i));
  }
  for (const torch::Tensor& tensor : block.parameters()) {
    made.elements += static_cast<double>(tensor.numel());
    const auto known = index_of.find(tensor.unsafeGetTensorImpl());
    if (known == index_of.end()) continue;
    made.parameters.push_back(known->second);
    for (const Segment& segment : plan.layout->parameter_segments(known->second)) made.chunks.push_back(segment.chunk);
  }
  std::sort(made.chunks.begin(), made.chunks.end());
  made.chunks.erase(std::unique(made.chunks.begin(), made.chunks.end()), made.chunks.end());
  return blocks.emplace(&block, std::move(made)).first->second;
}

// ---- reading -------------------------------------------------------------------------------------------------------

std::int64_t Engine::Impl::find_parameter(const std::string& name) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    if (plan.trainable[i].name == name) return static_cast<std::int64_t>(i);
    names.push_back(plan.trainable[i].name);
  }
  const std::string nearest = nearest_name(name, names);
  throw InvalidArgument(fmt::format("no trained parameter is named \"{}\"{}", name,
                                    nearest.empty() ? "" : fmt::format("; the nearest name is \"{}\"", nearest)));
}

torch::Tensor Engine::Impl::gather(std::int64_t parameter, const std::function<const View&(std::int64_t chunk)>& role) {
  runtime->wait_all();
  const HostScope host;
  const torch::NoGradGuard no_grad;
  torch::Tensor out = torch::empty(plan.trainable[static_cast<std::size_t>(parameter)].tensor.sizes(), torch::kFloat);
  for (const Segment& segment : plan.layout->parameter_segments(parameter)) {
    const float* from = role(segment.chunk).as<const float>() + segment.chunk_offset;
    std::copy_n(from, segment.count, out.mutable_data_ptr<float>() + segment.parameter_offset);
  }
  return out;
}

}  // namespace spillway
