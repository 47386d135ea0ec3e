// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/engine.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "spillway/core/error.h"
#include "spillway/core/nearest.h"
#include "spillway/runtime/machine.h"
#include "spillway/runtime/runtime.h"
#include "spillway/train/lr_schedule.h"
#include "train/engine_plan.h"
#include "train/parameters.h"

namespace spillway {
namespace {

/// A block that went through the gate.
struct GatedBlock {
  std::int64_t index = 0;
  TraceLabel label;
  std::vector<std::int64_t> parameters;  // trainable ones
  std::vector<std::int64_t> chunks;
  double elements = 0;
};

/// A block's call that is going on.
struct OpenBlock {
  GatedBlock* block = nullptr;
  std::int64_t begin_ns = 0;
};

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

struct Engine::Impl {
  Impl(torch::nn::Module& model, Config config, EngineOptions options);
  ~Impl();

  void move_parameters();
  void set_hooks();
  void remove_hooks() noexcept;
  void on_gradient(std::int64_t parameter);
  GatedBlock& gated_block(const torch::nn::Module& block);
  void run_backward(const torch::Tensor& loss, double seed, bool last);
  void set_learning_rates();
  StepResult finish_step(StepStatus status, double norm);
  void warn_not_finite();
  void wait_for_ungated_chunks();
  std::int64_t find_parameter(const std::string& name) const;
  torch::Tensor gather(std::int64_t parameter, const std::function<const View&(std::int64_t chunk)>& role);

  torch::nn::Module& model;
  CausalLM* const causal_lm;  // the same, where it is one
  const Config config;
  const EngineOptions options;
  EnginePlan plan;
  const std::vector<Hyperparameters> base_hyperparameters;
  std::unique_ptr<Machine> machine;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Schedule> schedule;
  std::unique_ptr<DeviceScope> device_scope;

  // ---- the step that is going on
  bool in_backward = false;
  std::int64_t micro_batches = 0;
  double weight_sum = 0;
  bool any_gradient = false;

  // ---- the run
  double first_weight = 0;  // W0: 0 until there was one
  std::int64_t updates = 0, skipped = 0, not_finite = 0;
  bool said_updates_wait = false;

  // ---- the gate
  std::unordered_map<const torch::nn::Module*, GatedBlock> blocks;
  std::vector<OpenBlock> open_blocks;
  std::vector<bool> gated;  // parameters whose block went through the gate since the last step
  TraceTrack forward_track, engine_track;
};

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

// ---- the public face -----------------------------------------------------------------------------------------------

Engine::Engine(torch::nn::Module& model, Config config, EngineOptions options)
    : impl_(std::make_unique<Impl>(model, std::move(config), std::move(options))) {
  if (impl_->causal_lm != nullptr) impl_->causal_lm->set_block_call(block_call());
}

Engine::~Engine() = default;

BlockCall Engine::block_call() {
  return [this](torch::nn::Module& block, const BlockForward& forward, const std::vector<torch::Tensor>& inputs) {
    const BlockScope scope(*this, block);
    return forward(inputs);
  };
}

std::int64_t Engine::enter_block(const torch::nn::Module& module) {
  GatedBlock& block = impl_->gated_block(module);
  for (std::int64_t chunk : block.chunks) impl_->runtime->wait_parameters(chunk);
  for (std::int64_t parameter : block.parameters) impl_->gated[static_cast<std::size_t>(parameter)] = true;
  impl_->open_blocks.push_back({&block, Trace::now()});
  return block.index;
}

void Engine::leave_block(std::int64_t index) noexcept {
  const OpenBlock open = impl_->open_blocks.back();
  impl_->open_blocks.pop_back();
  impl_->machine->trace().span(impl_->forward_track, open.block->label, open.begin_ns, Trace::now(), 0, index);
}

void Engine::backward(const torch::Tensor& loss, BackwardOptions options) {
  require(loss.defined() && loss.numel() == 1, "backward needs a loss of one element");
  require(loss.requires_grad(), "backward needs a loss that depends on a parameter that requires a gradient");
  require(std::isfinite(options.weight) && options.weight >= 0,
          fmt::format("a micro-batch's weight is {}; expected a finite number, zero or more", options.weight));
  const std::int64_t number = ++impl_->micro_batches;
  const bool last = options.last.value_or(impl_->config.accumulation > 0 && number >= impl_->config.accumulation);
  if (!options.last && impl_->config.accumulation == 0 && !std::exchange(impl_->said_updates_wait, true)) {
    log(impl_->options.log, LogLevel::info,
        "neither backward(.last) nor accumulation says which micro-batch ends a step: its norm waits for step()");
  }
  if (options.weight == 0) return;
  if (impl_->first_weight == 0) impl_->first_weight = options.weight;
  impl_->run_backward(loss, options.weight / impl_->first_weight, last);
  impl_->weight_sum += options.weight;
}

StepResult Engine::step() {
  Impl& s = *impl_;
  if (s.micro_batches == 0) throw StateError("step() needs a backward() before it in this step");
  const std::int64_t begin = Trace::now();
  s.set_learning_rates();
  if (s.weight_sum == 0 || !s.any_gradient) return s.finish_step(StepStatus::empty, 0);
  std::vector<std::size_t> updated;
  for (std::size_t i = 0; i < s.plan.trainable.size(); ++i) {
    if (s.runtime->has_gradient(static_cast<std::int64_t>(i))) updated.push_back(i);
  }
  const StepDecision decision = s.schedule->step({s.first_weight / s.weight_sum, s.config.clip_norm});
  if (!decision.finite) {
    s.warn_not_finite();
    return s.finish_step(StepStatus::not_finite, decision.grad_norm);
  }
  for (std::size_t i : updated) s.plan.trainable[i].tensor.unsafeGetTensorImpl()->bump_version();
  s.wait_for_ungated_chunks();
  s.gated.assign(s.gated.size(), false);
  const StepResult result = s.finish_step(StepStatus::updated, decision.grad_norm);
  s.machine->trace().span(s.engine_track, s.machine->trace().label("step"), begin, Trace::now(), 0, result.step);
  return result;
}

void Engine::wait_parameters() {
  impl_->runtime->wait_all();
}

torch::Tensor Engine::master(const std::string& name) {
  return impl_->gather(impl_->find_parameter(name),
                       [this](std::int64_t chunk) -> const View& { return impl_->runtime->store().master(chunk); });
}

torch::Tensor Engine::optimizer_state(const std::string& name, std::int64_t k) {
  require(k >= 0 && k < impl_->plan.spec.optimizer_states,
          fmt::format("there is no optimizer state {}: expected 0 to {}", k, impl_->plan.spec.optimizer_states - 1));
  return impl_->gather(impl_->find_parameter(name), [this, k](std::int64_t chunk) -> const View& {
    return impl_->runtime->store().optimizer_state(chunk, k);
  });
}

std::int64_t Engine::updates(const std::string& name) {
  return impl_->runtime->updates(impl_->find_parameter(name));
}

const Config& Engine::config() const {
  return impl_->config;
}

EngineSummary Engine::summary() const {
  EngineSummary out;
  out.plan = impl_->plan.memory;
  const auto device = impl_->machine->ledger(Tier::device);
  out.device_at_peak = device->usage_at_peak();
  out.device_capacity = device->capacity();
  out.device_peak = device->peak();
  out.host_peak = impl_->machine->ledger(Tier::pinned)->peak() + impl_->machine->ledger(Tier::host)->peak();
  out.lanes = impl_->machine->trace().totals();
  return out;
}

void Engine::write_trace(const std::filesystem::path& file) const {
  impl_->machine->trace().write_chrome_json(file);
}

MemoryPlan plan_memory(const torch::nn::Module& model, const Config& config) {
  return make_engine_plan(model, config).memory;
}

}  // namespace spillway
