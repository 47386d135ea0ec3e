// SPDX-License-Identifier: Apache-2.0
#include "train/engine_impl.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "kernels/cpu_kernels.h"
#include "spillway/core/error.h"
#include "spillway/core/nearest.h"
#include "spillway/runtime/cores.h"
#include "spillway/train/lr_schedule.h"
#include "train/random_numbers.h"

namespace spillway {
namespace {

MachineOptions machine_options(const Config& config, const EngineOptions& options, const RunPlan& plan) {
  MachineOptions out;
  out.device = config.device;
  if (config.host_memory) out.host_memory = Bytes{config.host_memory->value / plan.place.local_ranks};
  CoreRequest request{.threads = config.threads, .cores = config.cores};
  if (options.communicator != nullptr) {
    request.local_rank = options.communicator->local_rank();
    request.local_size = options.communicator->local_size();
  }
  const CorePlan cores = plan_cores(request);
  out.threads = cores.threads;
  out.cores = cores.processors;
  out.instruction_set = config.instruction_set;
  const std::string set =
      config.instruction_set.empty() ? std::string(kernels::cpu_kernels().name) : config.instruction_set;
  log(options.log, LogLevel::info, fmt::format("CPU optimizer: {} kernels, {}", set, cores.description));
  out.trace_events = options.trace_events;
  out.delay = options.delay;
  if (plan.place.ranks > 1) out.communicator = options.communicator;
  out.current_stream = torch_stream(config.device);
  return out;
}

// 1, 10, 100, ...: how often a repeated warning is worth a line.
bool worth_a_line(std::int64_t count) {
  while (count % 10 == 0) count /= 10;
  return count == 1;
}

}  // namespace

Engine::Impl::Impl(torch::nn::Module& m, Config c, EngineOptions o)
    : module(m),
      causal_lms(causal_lms_in(m)),
      config(std::move(c)),
      options(std::move(o)),
      buffers(m.buffers()),
      ranks(options.communicator != nullptr && options.communicator->size() > 1 ? options.communicator : nullptr),
      plan(make_engine_plan(m, config, options)),
      base_hyperparameters(plan.hyperparameters),
      scaler(config.precision == DType::f16 ? LossScaler(config.loss_scale) : LossScaler()),
      known_parameters(parameter_identities(m)) {
  check_torch_device(config.device);
  if (ranks != nullptr) {
    require(ranks->uses_stream() == (config.device.kind == DeviceConfig::Kind::cuda),
            fmt::format("ranks that talk through {} take {} memory, but device.kind is {}", ranks->transport(),
                        ranks->uses_stream() ? "a GPU's" : "the host's",
                        config.device.kind == DeviceConfig::Kind::cuda ? "cuda" : "emulated"));
  }
  together([this] {
    check_machine_fits(plan, config);
    // Ranks of a host look at the same memory: all have looked before one takes its part.
    if (ranks != nullptr) check_same_configuration();
  });
  const TorchDeviceScope device(config.device);
  machine = make_machine(machine_options(config, options, plan));
  runtime = std::make_unique<Runtime>(*machine, *plan.layout, plan.spec, config.optimizer, base_hyperparameters);
  schedule = plan.schedule->make(*runtime);
  for (const ModelParameter& parameter : plan.trainable) versions.push_back(parameter.tensor._version());
  gated.assign(plan.trainable.size(), false);
  on_its_way.assign(plan.trainable.size(), false);
  rows.assign(plan.trainable.size(), 0);
  forward_track = machine->trace().track("forward");
  engine_track = machine->trace().track("engine");
  try {
    set_update_rules();
    set_hooks();
    together([this] {
      move_parameters();
      if (ranks != nullptr) check_same_weights(std::exchange(weight_checksums, {}));
    });
    cap_torch_memory(config.device, *machine->ledger(Tier::device));
    reset_torch_memory_peak(config.device);  // another engine's was before
    if (config.low_memory_accumulation && config.precision != DType::f32) {
      log(options.log, LogLevel::warning,
          fmt::format("low-memory accumulation: gradients are summed in {}, so sums of many micro-batches lose small "
                      "gradients that fp32 accumulation keeps",
                      to_string(config.precision)));
    }
    if (ranks != nullptr && config.transport_sums) {
      log(options.log, LogLevel::warning,
          fmt::format("ranks' gradients are summed by {} in {}: results may differ in bits from placement to placement "
                      "and from run to run",
                      ranks->transport(), to_string(plan.spec.piece_type())));
    }
  } catch (...) {
    give_back();
    throw;
  }
  for (const ModelParameter& parameter : plan.frozen) frozen_versions.push_back(parameter.tensor._version());
  // Also where a HostScope is open now: it ends before the engine does.
  if (machine->kind() == DeviceKind::emulated) {
    device_scope = std::make_unique<DeviceScope>(machine->ledger(Tier::device));
  }
}

Engine::Impl::~Impl() {
  const TorchDeviceScope device(config.device);
  for (const auto& model : causal_lms) model->set_block_call({});
  device_scope.reset();
  // What failed on this rank may have left the others, and this one's network lane, waiting.
  if (ranks != nullptr && std::uncaught_exceptions() > 0) ranks->fail("its engine was left by an exception");
  if (!runtime->wait_idle()) {
    log(options.log, LogLevel::error,
        "an update or an upload failed: some of the weights that the module gets back are older than others");
  }
  give_back();
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
  for (const ModelParameter& parameter : plan.frozen) {  // so that no other engine takes it
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, std::make_unique<GradientHook>([] {}));
  }
}

void Engine::Impl::on_gradient(std::int64_t index) {
  const TorchDeviceScope device(config.device);  // autograd's thread is another
  const ModelParameter& parameter = plan.trainable[static_cast<std::size_t>(index)];
  torch::Tensor& slot = plan.trainable[static_cast<std::size_t>(index)].tensor.mutable_grad();
  if (!in_backward) {
    slot.reset();  // else the next backward would add to it
    throw StateError(fmt::format(
        "parameter {} got a gradient outside Engine::backward: call engine.backward(loss) instead of loss.backward() "
        "(torch::autograd::grad through a recomputed block comes here too)",
        parameter.name));
  }
  require(slot.layout() == torch::kStrided,
          fmt::format("the gradient of {} is sparse, which is not supported: use a dense embedding", parameter.name));
  if (!uses_left.empty() && --uses_left[static_cast<std::size_t>(index)] > 0) return;  // LibTorch adds the others to it
  // Backward multiplies twice: for the gradients of inputs and of weights.
  pace(4.0 * static_cast<double>(parameter.tensor.numel()) *
       static_cast<double>(rows[static_cast<std::size_t>(index)]));
  const torch::NoGradGuard no_grad;
  const torch::Tensor gradient = slot.contiguous();
  if (gradient.numel() > 0 && !profiling) {
    schedule->gradient_ready({index, static_cast<const std::byte*>(gradient.const_data_ptr())});
    pace(0);  // a wait for a slot is no computation
  }
  slot.reset();
}

void Engine::Impl::run_backward(const torch::Tensor& loss, double seed, bool last) {
  const TorchDeviceScope device(config.device);
  for (ModelParameter& parameter : plan.trainable) {
    require(
        !parameter.tensor.mutable_grad().defined(),
        fmt::format("parameter {} has a .grad that was not made by this engine's backward: clear it (its engine takes "
                    "gradients as they come)",
                    parameter.name));
  }
  const std::unique_ptr<DeviceScope> memory = count_memory();
  const std::int64_t begin = Trace::now();
  pace(0);
  uses_left.clear();
  if (recomputed && loss.defined()) count_uses(loss);
  schedule->begin_backward(last);
  in_backward = true;
  try {
    if (loss.defined()) torch::autograd::backward({loss}, {torch::full_like(loss, seed)});
    flush_gradients();
    schedule->end_backward();
  } catch (...) {
    // A part of this micro-batch's gradients is in the sums, so the step's sums are worth nothing.
    in_backward = false;
    for (ModelParameter& parameter : plan.trainable) parameter.tensor.mutable_grad().reset();
    schedule->abandon_backward();
    runtime->wait_discard_gradients();
    undo_step();
    throw;
  }
  in_backward = false;
  machine->trace().span(engine_track, machine->trace().label("backward"), begin, Trace::now());
}

// ---- the step ------------------------------------------------------------------------------------------------------

void Engine::Impl::forget_step() {
  micro_batches = 0;
  weight_sum = 0;
}

void Engine::Impl::undo_step() {
  if (micro_batches > 0) first_weight = first_weight_before;
  forget_step();
}

void Engine::Impl::check_thread() const {
  if (std::this_thread::get_id() == thread) return;
  throw StateError("this engine was made by another thread: the thread that makes an engine makes all calls to it");
}

void Engine::Impl::check_holds_states() const {
  check_thread();
  if (released) throw StateError("this engine was released: its states are not in memory; call restore() first");
}

void Engine::Impl::check_between_steps(const char* what) const {
  if (micro_batches > 0) {
    throw StateError(fmt::format("{} inside a step: {} backward calls wait for step()", what, micro_batches));
  }
}

void Engine::Impl::check_usable() const {
  check_holds_states();
  if (failure.empty()) return;
  throw StateError(
      "a step of this engine failed and may have updated some parameters only; make a new one from the last "
      "checkpoint. The failure: " +
      failure);
}

void Engine::Impl::check_parameters() {
  check_parameter_identities(module, known_parameters);
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    const ModelParameter& parameter = plan.trainable[i];
    const std::byte* expected =
        runtime->store().working().data + plan.layout->offset(static_cast<std::int64_t>(i)) * size_of(config.precision);
    if (parameter.tensor.numel() > 0 && parameter.tensor.const_data_ptr() != expected) {
      throw StateError(
          fmt::format("parameter {} no longer lies where the engine put it: a module must not be converted, "
                      "moved or loaded into while it has an engine",
                      parameter.name));
    }
    if (parameter.tensor._version() == versions[i]) continue;
    note_landed(i);
    runtime->load_masters(static_cast<std::int64_t>(i));  // written by the program since the last step
    versions[i] = parameter.tensor._version();
  }
  for (const ModelParameter& parameter : plan.frozen) {
    if (!parameter.tensor.requires_grad()) continue;
    throw StateError(
        fmt::format("parameter {} was frozen when the engine was made and has no optimizer states: make a new "
                    "engine to train it",
                    parameter.name));
  }
}

void Engine::Impl::set_learning_rates() {
  const double factor = lr_factor(config.lr_schedule, updates);
  for (std::size_t g = 0; g < base_hyperparameters.size(); ++g) {
    runtime->hyperparameters()[g] = base_hyperparameters[g];
    runtime->hyperparameters()[g].lr *= factor;
  }
}

StepResult Engine::Impl::skip_not_finite(double norm) {
  const double old_scale = scaler.scale();
  scaler.update(false);
  ++not_finite;
  const bool speak = scaler.exhausted() || worth_a_line(not_finite);
  std::string culprits;
  if (speak) {
    for (const std::string& text : runtime->describe_non_finite(3)) culprits += (culprits.empty() ? "" : "; ") + text;
  }
  const StepResult result = finish_step(StepStatus::not_finite, norm);
  if (scaler.exhausted()) {
    throw StateError(
        fmt::format("gradients were not finite in {} steps in a row with the loss scale at its minimum of {}: "
                    "{}. Weights trained in bf16 often overflow in fp16: use bf16 or fp32",
                    config.loss_scale.most_skips_at_minimum, scaler.scale(), culprits));
  }
  if (!speak) return result;
  const std::string scale = scaler.dynamic() ? fmt::format("; loss scale {} -> {}", old_scale, scaler.scale()) : "";
  log(options.log, LogLevel::warning,
      fmt::format("step skipped, nothing changed: gradients are not finite: {} ({} such steps so far{})", culprits,
                  not_finite, scale));
  return result;
}

void Engine::Impl::list_unused(const std::vector<std::size_t>& updated) const {
  std::string names;
  std::size_t unused = 0;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    if (std::find(updated.begin(), updated.end(), i) != updated.end() || plan.trainable[i].tensor.numel() == 0)
      continue;
    if (++unused <= 5) names += (names.empty() ? "" : ", ") + plan.trainable[i].name;
  }
  if (unused == 0) return;
  log(options.log, LogLevel::info,
      fmt::format("{} of {} trained parameters had no gradient in the first update and stood still: {}{}", unused,
                  plan.trainable.size(), names, unused > 5 ? ", ..." : ""));
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
  result.loss_scale = scaler.scale();
  result.skipped = skipped;
  result.device_peak = device_peak();
  result.host_peak = machine->ledger(Tier::pinned)->peak() + machine->ledger(Tier::host)->peak();
  forget_step();
  return result;
}

}  // namespace spillway
