// SPDX-License-Identifier: Apache-2.0
//
// Promise 2: what virtual lanes record is what real lanes do.
#include "spillway/plan/record_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/runtime/runtime.h"
#include "support/op_log.h"

namespace spillway {
namespace {

using test::OpLog;

ModelConfig tiny_model(bool tied) {
  ModelConfig config;
  config.vocabulary = 64;
  config.hidden = 32;
  config.intermediate = 80;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.max_position = 32;
  config.tied_head = tied;
  return config;
}

Layout layout_of(const ModelConfig& model, std::int64_t chunk_elements) {
  std::vector<ParameterInfo> parameters;
  for (const ParameterShape& shape : parameter_shapes(model)) parameters.push_back({shape.name, shape.shape, 0});
  return {std::move(parameters), chunk_elements};
}

StateSpec spec_of(const Layout& layout, const ScheduleEntry& schedule, DType working, std::int64_t slots) {
  StateSpec spec;
  spec.working = working;
  spec.placement.assign(layout.chunks().size(), schedule.placement);
  if (schedule.stages) spec.device_slots = spec.pinned_slots = slots;
  if (schedule.stages && working != DType::f32) spec.upload_slots = slots;
  return spec;
}

/// What an engine's step does for parameters that no gate awaits.
void wait_for_ungated(Runtime& runtime, const ModelEvents& events) {
  for (const Segment& segment : runtime.layout().segments()) {
    const bool gated = std::any_of(events.gates.begin(), events.gates.end(), [&](const ForwardGate& gate) {
      return std::find(gate.parameters.begin(), gate.parameters.end(), segment.parameter) != gate.parameters.end();
    });
    if (!gated) runtime.wait_parameters(segment.chunk);
  }
}

/// Stretches ops here and there, so that an edge that no real lane keeps shows.
OpDelay stretch(const OpDelay& log) {
  return [log](const std::string& lane, const Op& op) {
    log(lane, op);
    thread_local std::mt19937 random(static_cast<unsigned>(lane.size() * 31 + lane.front()));
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  };
}

/// The same run on the emulated device. Every wait of forward and every gradient comes in the order of the events;
/// step `infinite_step` has one that is not finite.
std::vector<StepDecision> real_run(OpLog& log, const Layout& layout, const StateSpec& spec,
                                   const ScheduleEntry& schedule, const ModelEvents& events, const RecordOptions& run,
                                   std::int64_t infinite_step, bool stretched) {
  MachineOptions options;
  options.delay = stretched ? stretch(log.delay()) : log.delay();
  const auto machine = make_emulated_machine(options);
  Runtime runtime(*machine, layout, spec, OptimizerKind::adamw, {Hyperparameters{}});
  const auto made = schedule.make(runtime);
  std::vector<StepDecision> decisions;
  std::size_t backward = 0;
  for (std::int64_t step = 0; step < run.steps; ++step) {
    for (std::int64_t m = 0; m < run.micro_batches; ++m) {
      for (const ForwardGate& gate : events.gates) {
        for (std::int64_t p : gate.parameters) {
          for (const Segment& segment : layout.parameter_segments(p)) runtime.wait_parameters(segment.chunk);
        }
      }
      made->begin_backward(m + 1 == run.micro_batches && run.last_is_known);
      for (std::int64_t p : events.gradients[backward++ % events.gradients.size()]) {
        const auto count = static_cast<std::size_t>(layout.parameters()[static_cast<std::size_t>(p)].numel());
        // fp32 infinity and a pair of bf16 numbers of which one is infinite have the same upper half.
        const std::vector<float> values(count, step == infinite_step ? std::numeric_limits<float>::infinity() : 0.25F);
        made->gradient_ready({p, reinterpret_cast<const std::byte*>(values.data())});
      }
      made->end_backward();
    }
    decisions.push_back(made->step(run.step));
    if (decisions.back().finite) {
      wait_for_ungated(runtime, events);
    } else {
      runtime.wait_discard_gradients();
    }
  }
  runtime.wait_all();
  return decisions;
}

/// Every recorded edge against the real run's begins and ends.
class EdgeCheck {
 public:
  EdgeCheck(const OpGraph& graph, OpLog& log) : graph_(graph) {
    std::vector<std::size_t> next(graph.lanes().size());
    for (const RecordedOp& op : graph.ops()) {
      const auto lane = static_cast<std::size_t>(op.lane);
      const bool mark = op.kind == OpKind::compute;
      times_.push_back(mark ? OpLog::Times{} : log.times(graph.lanes()[lane])[next[lane]++]);
      // A mark is done when the compute before it is.
      if (mark && next[lane] > 0) times_.back().end = log.times(graph.lanes()[lane])[next[lane] - 1].end;
    }
  }

  int check() {
    for (std::size_t i = 0; i < times_.size(); ++i) {
      for (std::int64_t before : graph_.ops()[i].after) expect_order(before, i);
    }
    for (const RecordedWait& wait : graph_.waits()) {
      for (auto i = static_cast<std::size_t>(wait.before); i < times_.size(); ++i) {
        const bool follows = wait.side == RecordedWait::Side::host || graph_.ops()[i].lane == 0;
        if (follows) expect_order(wait.op, i);
      }
    }
    return edges_;
  }

 private:
  void expect_order(std::int64_t before, std::size_t after) {
    ASSERT_LT(before, static_cast<std::int64_t>(after));
    if (times_[after].begin < 0) return;  // a mark begins nothing
    EXPECT_LT(times_[static_cast<std::size_t>(before)].end, times_[after].begin) << before << " -> " << after;
    ++edges_;
  }

  const OpGraph& graph_;
  std::vector<OpLog::Times> times_;
  int edges_ = 0;
};

struct Case {
  std::string schedule;
  DType working = DType::f32;
  bool tied = false;
  std::int64_t chunk_elements = 2048, slots = 2, micro_batches = 1;
  std::int64_t infinite_step = -1;
  bool stretched = false;
};

constexpr std::int64_t kSteps = 3;

RecordOptions options_of(const Case& c) {
  RecordOptions options;
  options.steps = kSteps;
  options.micro_batches = c.micro_batches;
  options.rows = 24;
  options.step = {1.0, 0.5};
  for (std::int64_t s = 0; s < kSteps; ++s) options.machine.oracle.first.push_back({1, s != c.infinite_step});
  return options;
}

/// Returns the number of edges that were checked.
int expect_recorded_run_is_real_run(const Case& c, const ModelEvents& events) {
  SCOPED_TRACE(testing::Message() << c.schedule << " " << to_string(c.working) << " tied " << c.tied << " chunk "
                                  << c.chunk_elements << " slots " << c.slots << " micro-batches " << c.micro_batches
                                  << " infinite step " << c.infinite_step);
  const Layout layout = layout_of(tiny_model(c.tied), c.chunk_elements);
  const ScheduleEntry& schedule = find_schedule(c.schedule);
  const StateSpec spec = spec_of(layout, schedule, c.working, c.slots);
  const RecordOptions options = options_of(c);
  const RecordedRun recorded = record_run(layout, spec, schedule, events, options);
  OpLog log;
  const auto decisions = real_run(log, layout, spec, schedule, events, options, c.infinite_step, c.stretched);
  for (std::size_t s = 0; s < decisions.size(); ++s) EXPECT_EQ(decisions[s].finite, recorded.decisions[s].finite);
  EXPECT_GT(expect_same_ops(recorded.graph, log), 3 * layout.parameters().size());
  if (testing::Test::HasFailure()) return 0;
  const MemoryPlan plan = plan_state(layout, spec);
  for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) EXPECT_EQ(recorded.memory[tier], plan[tier]);
  return EdgeCheck(recorded.graph, log).check();
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleEntry& entry : schedules()) names.emplace_back(entry.name);
  return names;
}

class RecordedRuns : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, RecordedRuns, testing::ValuesIn(schedule_names()));

TEST_P(RecordedRuns, AreTheRealRunsLaneByLaneAndEveryEdgeHolds) {
  int cells = 0;
  for (DType working : {DType::f32, DType::bf16}) {
    for (bool tied : {false, true}) {
      for (std::int64_t chunk : {1024, 3000, 7168, 1 << 20}) {
        for (std::int64_t slots : {1, 3}) {
          for (std::int64_t micro_batches : {1, 3}) {
            for (std::int64_t infinite_step : {-1, 1}) {
              const Case c{GetParam(), working, tied, chunk, slots, micro_batches, infinite_step};
              EXPECT_GT(expect_recorded_run_is_real_run(c, declared_events(tiny_model(tied))), 100);
              if (testing::Test::HasFailure()) return;
              ++cells;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, 2 * 2 * 4 * 2 * 2 * 2);
}

TEST_P(RecordedRuns, EdgesHoldWhereOpsAreStretched) {
  for (DType working : {DType::f32, DType::bf16}) {
    for (std::int64_t slots : {1, 3}) {
      const Case c{GetParam(), working, true, 3000, slots, 2, 1, true};
      EXPECT_GT(expect_recorded_run_is_real_run(c, declared_events(tiny_model(true))), 100);
    }
  }
}

TEST_P(RecordedRuns, FollowEventsThatDifferBetweenMicroBatches) {
  // Parameters without a gradient, an order that no model has, a parameter whose gradient comes in two parts, blocks
  // that never went through the gate, a micro-batch without any gradient.
  ModelEvents events = declared_events(tiny_model(false));
  events.gates.resize(2);
  const std::vector<std::int64_t> all = events.gradients[0];
  std::vector<std::int64_t> some, twice{5, 0, 5, 7, 6};
  std::copy_if(all.begin(), all.end(), std::back_inserter(some), [](std::int64_t p) { return p % 3 != 0; });
  std::vector<std::int64_t> shuffled = all;
  for (std::size_t i = 0; i < shuffled.size(); ++i) std::swap(shuffled[i], shuffled[(i * 7 + 3) % shuffled.size()]);
  events.gradients = {some, twice, shuffled, {}};
  for (DType working : {DType::f32, DType::bf16}) {
    for (std::int64_t slots : {1, 2, 4}) {
      for (std::int64_t chunk : {1024, 5120}) {
        const Case c{GetParam(), working, false, chunk, slots, 3};
        EXPECT_GT(expect_recorded_run_is_real_run(c, events), 100);
      }
    }
  }
}

TEST(RecordRun, GivesTheSameGraphForTheSameSeed) {
  const Layout layout = layout_of(tiny_model(true), 2048);
  const ScheduleEntry& schedule = find_schedule("zero_offload");
  const StateSpec spec = spec_of(layout, schedule, DType::bf16, 2);
  RecordOptions options;
  options.steps = 12;
  options.machine.oracle = {.not_finite = 0.4, .seed = 5};
  const ModelEvents events = declared_events(tiny_model(true));
  const RecordedRun first = record_run(layout, spec, schedule, events, options);
  EXPECT_TRUE(first.graph == record_run(layout, spec, schedule, events, options).graph);
  options.machine.oracle.seed = 6;
  EXPECT_FALSE(first.graph == record_run(layout, spec, schedule, events, options).graph);
  const auto skipped = std::count_if(first.decisions.begin(), first.decisions.end(),
                                     [](const StepDecision& decision) { return !decision.finite; });
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 12);
}

TEST(RecordRun, CountsTheComputationOfEveryGateAndGradient) {
  const ModelConfig model = tiny_model(true);
  const Layout layout = layout_of(model, 2048);
  const ScheduleEntry& schedule = find_schedule("resident");
  RecordOptions options;
  options.rows = 10;
  const auto graph =
      record_run(layout, spec_of(layout, schedule, DType::f32, 0), schedule, declared_events(model), options).graph;
  double forward = 0, backward = 0, elements = 0;
  for (const RecordedOp& op : graph.ops()) {
    if (op.kind != OpKind::compute) continue;
    forward += std::string(op.name) == "forward" ? op.amount : 0;
    backward += std::string(op.name) == "backward" ? op.amount : 0;
  }
  for (const ParameterInfo& parameter : layout.parameters()) elements += static_cast<double>(parameter.numel());
  EXPECT_EQ(forward, 2 * 10 * (elements + 64 * 32));  // the tied table is used twice
  EXPECT_EQ(backward, 4 * 10 * elements);
}

TEST(RecordRun, RecomputesEachGateButTheFirstBeforeItsGradients) {
  const ModelConfig model = tiny_model(true);
  const Layout layout = layout_of(model, 2048);
  const ScheduleEntry& schedule = find_schedule("resident");
  RecordOptions options;
  options.rows = 10;
  options.recompute = true;
  const ModelEvents events = declared_events(model);
  const auto graph = record_run(layout, spec_of(layout, schedule, DType::f32, 0), schedule, events, options).graph;
  using Mark = std::pair<std::string, std::int64_t>;
  std::vector<Mark> marks;  // without those that repeat the one before
  for (const RecordedOp& op : graph.ops()) {
    const Mark mark{op.name, op.index};
    if (mark.first == "recompute") {
      EXPECT_EQ(op.amount, 20 * events.gates[static_cast<std::size_t>(op.index)].elements);
    }
    const bool kept = op.kind == OpKind::compute && mark.first != "forward";
    if (kept && (marks.empty() || marks.back() != mark)) marks.push_back(mark);
  }
  // The tied table is the head's too; its gradient comes last.
  EXPECT_EQ(marks, (std::vector<Mark>{{"recompute", 3},
                                      {"backward", 3},
                                      {"recompute", 2},
                                      {"backward", 2},
                                      {"recompute", 1},
                                      {"backward", 1},
                                      {"backward", 3}}));
}

TEST(RecordRun, OfSeventyBillionParametersHoldsNoMemoryForThem) {
  ModelConfig model;
  model.vocabulary = 128256;
  model.hidden = 8192;
  model.intermediate = 28672;
  model.layers = 80;
  model.heads = 64;
  model.kv_heads = 8;
  model.head_dim = 128;
  const Layout layout = layout_of(model, std::int64_t{16} << 20);
  const ScheduleEntry& schedule = find_schedule("zero_offload");
  const StateSpec spec = spec_of(layout, schedule, DType::bf16, 3);
  RecordOptions options;
  options.steps = 2;
  options.micro_batches = 2;
  options.rows = 8192;
  const RecordedRun run = record_run(layout, spec, schedule, declared_events(model), options);
  EXPECT_GT(layout.padded_elements(), std::int64_t{70'000'000'000});
  EXPECT_EQ(run.memory[Tier::pinned], plan_state(layout, spec)[Tier::pinned]);
  EXPECT_GT(run.memory[Tier::pinned].total().value, std::int64_t{1} << 40);  // more than this machine could hold
  double down = 0;
  for (const RecordedOp& op : run.graph.ops()) {
    if (std::string(op.name) == "gradients down") down += op.amount;
  }
  EXPECT_EQ(down, 4.0 * 2 * static_cast<double>(layout.padded_elements()));  // two bytes a micro-batch
}

TEST(RecordRun, RefusesAMachineTooSmallAndEventsOfAnotherModel) {
  const Layout layout = layout_of(tiny_model(false), 2048);
  const ScheduleEntry& schedule = find_schedule("zero_offload");
  const StateSpec spec = spec_of(layout, schedule, DType::f32, 2);
  RecordOptions options;
  options.machine.device_memory = Bytes{4096};
  EXPECT_THROW(record_run(layout, spec, schedule, declared_events(tiny_model(false)), options), OutOfMemory);
  ModelConfig deeper = tiny_model(false);
  deeper.layers = 3;
  EXPECT_THROW(record_run(layout, spec, schedule, declared_events(deeper), {}), InvalidArgument);
  EXPECT_THROW(record_run(layout, spec, schedule, {}, {}), InvalidArgument);
  options = {};
  options.steps = 0;
  EXPECT_THROW(record_run(layout, spec, schedule, declared_events(tiny_model(false)), options), InvalidArgument);
}

}  // namespace
}  // namespace spillway
