// SPDX-License-Identifier: Apache-2.0
#include "spillway/plan/record_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/runtime/runtime.h"

namespace spillway {
namespace {

void check_events(const Layout& layout, const ModelEvents& events, const RecordOptions& options) {
  require(options.steps >= 1 && options.micro_batches >= 1,
          fmt::format("a run of {} steps of {} micro-batches was asked for; expected at least one of each",
                      options.steps, options.micro_batches));
  require(!events.gradients.empty(), "the events of a run list the gradients of at least one micro-batch");
  const auto count = static_cast<std::int64_t>(layout.parameters().size());
  const auto check_parameters = [&](const std::vector<std::int64_t>& parameters) {
    for (std::int64_t p : parameters) {
      require(p >= 0 && p < count, fmt::format("an event names parameter {}, but there are {}", p, count));
    }
  };
  for (const ForwardGate& gate : events.gates) check_parameters(gate.parameters);
  for (const auto& gradients : events.gradients) check_parameters(gradients);
}

std::vector<Hyperparameters> one_a_group(const Layout& layout) {
  int last = 0;
  for (const ParameterInfo& parameter : layout.parameters()) last = std::max(last, parameter.group);
  return std::vector<Hyperparameters>(static_cast<std::size_t>(last) + 1);
}

// Makes the calls that an engine makes. What an engine computes in between stands here as marks.
class Recorder {
 public:
  Recorder(VirtualMachine& machine, const Layout& layout, const StateSpec& spec, const ScheduleEntry& schedule,
           const ModelEvents& events, const RecordOptions& options)
      : machine_(machine),
        layout_(layout),
        events_(events),
        options_(options),
        runtime_(machine, layout, spec, OptimizerKind::adamw, one_a_group(layout)),
        schedule_(schedule.make(runtime_)),
        gate_of_(layout.parameters().size(), -1) {
    for (std::size_t g = 0; g < events.gates.size(); ++g) {
      chunks_of_gates_.push_back(chunks_of(events.gates[g]));
      for (std::int64_t p : events.gates[g].parameters) gate_of(p) = static_cast<std::int64_t>(g);
    }
  }

  std::vector<StepDecision> run() {
    std::vector<StepDecision> decisions;
    for (std::int64_t step = 0; step < options_.steps; ++step) {
      bool any_gradient = false;
      for (std::int64_t m = 0; m < options_.micro_batches; ++m) {
        forward();
        any_gradient |= backward(m + 1 == options_.micro_batches);
      }
      decisions.push_back(end_step(any_gradient));
    }
    return decisions;
  }

 private:
  std::int64_t& gate_of(std::int64_t parameter) { return gate_of_[static_cast<std::size_t>(parameter)]; }

  std::vector<std::int64_t> chunks_of(const ForwardGate& gate) const {
    std::vector<std::int64_t> chunks;
    for (std::int64_t p : gate.parameters) {
      for (const Segment& segment : layout_.parameter_segments(p)) chunks.push_back(segment.chunk);
    }
    std::sort(chunks.begin(), chunks.end());
    chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
    return chunks;
  }

  void compute(const char* name, std::int64_t gate, double flops) {
    if (flops > 0) static_cast<void>(machine_.compute().mark(name, gate, flops));
  }

  void forward() {
    for (std::size_t g = 0; g < events_.gates.size(); ++g) {
      for (std::int64_t chunk : chunks_of_gates_[g]) runtime_.wait_parameters(chunk);
      compute("forward", static_cast<std::int64_t>(g), forward_flops(g));
    }
    next_recomputed_ = static_cast<std::int64_t>(events_.gates.size()) - 1;
  }

  double forward_flops(std::size_t gate) const { return 2.0 * events_.gates[gate].elements * options_.rows; }

  /// Before the first gradient of a gate, its forward and that of the gates behind it have been done again.
  void recompute_down_to(std::int64_t gate) {
    for (; options_.recompute && next_recomputed_ >= std::max<std::int64_t>(gate, 1); --next_recomputed_) {
      compute("recompute", next_recomputed_, forward_flops(static_cast<std::size_t>(next_recomputed_)));
    }
  }

  /// Returns whether there was a gradient.
  bool backward(bool last) {
    const auto& gradients = events_.gradients[next_backward_++ % events_.gradients.size()];
    bool any = false;
    const bool adds_earlier = runtime_.reduces_last() && last && options_.last_is_known;
    runtime_.set_gradient_order(adds_earlier ? runtime_.with_earlier_gradients(gradients) : gradients);
    schedule_->begin_backward(last && options_.last_is_known);
    for (std::int64_t p : gradients) {
      const auto elements = static_cast<double>(layout_.parameters()[static_cast<std::size_t>(p)].numel());
      if (elements == 0) continue;
      if (gate_of(p) >= 0) {
        recompute_down_to(gate_of(p));
        compute("backward", gate_of(p), 4.0 * elements * options_.rows);
      }
      schedule_->gradient_ready({p, nullptr});
      any = true;
    }
    schedule_->end_backward();
    return any;
  }

  StepDecision end_step(bool any_gradient) {
    StepDecision decision;
    decision.finite = false;
    if (any_gradient) decision = schedule_->step(options_.step);
    if (!decision.finite) {
      runtime_.wait_discard_gradients();
      return decision;
    }
    wait_for_ungated_chunks();
    return decision;
  }

  void wait_for_ungated_chunks() {
    for (std::size_t c = 0; c < layout_.chunks().size(); ++c) {
      const auto segments = layout_.chunk_segments(static_cast<std::int64_t>(c));
      const bool all_gated =
          std::all_of(segments.begin(), segments.end(), [&](const Segment& s) { return gate_of(s.parameter) >= 0; });
      if (!all_gated) runtime_.wait_parameters(static_cast<std::int64_t>(c));
    }
  }

  VirtualMachine& machine_;
  const Layout& layout_;
  const ModelEvents& events_;
  const RecordOptions& options_;
  Runtime runtime_;
  const std::unique_ptr<Schedule> schedule_;
  std::vector<std::vector<std::int64_t>> chunks_of_gates_;
  std::vector<std::int64_t> gate_of_;  // a parameter's last in forward; below zero: none
  std::size_t next_backward_ = 0;
  std::int64_t next_recomputed_ = -1;  // gates are computed again from the last one down
};

}  // namespace

RecordedRun record_run(const Layout& layout, const StateSpec& spec, const ScheduleEntry& schedule,
                       const ModelEvents& events, const RecordOptions& options) {
  check_events(layout, events, options);
  VirtualMachineOptions machine_options = options.machine;
  machine_options.network = machine_options.network || layout.partition().shared();
  const auto machine = make_virtual_machine(std::move(machine_options));
  RecordedRun out;
  out.decisions = Recorder(*machine, layout, spec, schedule, events, options).run();
  for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) out.memory[tier] = machine->ledger(tier)->usage_at_peak();
  out.graph = machine->take_graph();
  return out;
}

}  // namespace spillway
