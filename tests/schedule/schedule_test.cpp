// SPDX-License-Identifier: Apache-2.0
//
// Schedules on the emulated device with made-up gradients: no LibTorch, so that sanitizers see every access.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/schedule/schedules.h"

namespace spillway {
namespace {

std::vector<ParameterInfo> parameters() {
  return {{"a", {3}, 0},    {"b", {70, 33}, 1}, {"c", {}, 0},    {"d", {2048}, 1},
          {"e", {4100}, 1}, {"f", {1}, 0},      {"g", {1500}, 1}};
}

struct Case {
  std::string schedule = "zero_offload";
  std::int64_t chunk_elements = 2048;
  std::int64_t slots = 2;
  int threads = 1;
  std::int64_t steps = 4, micro_batches = 2;
  double clip_norm = 1.0;
  unsigned order_seed = 0;  // of the order in which gradients become ready
  bool uneven = false;      // some parameters have no gradient in some micro-batches
  std::int64_t infinite_step = -1;
  OpDelay delay = {};
};

struct Outcome {
  std::vector<float> working, masters, first, second;
  std::vector<double> norms;
  std::vector<bool> finite;
  std::vector<std::int64_t> updates;
};

/// One run. Forward is imitated by waiting for each chunk and reading its working parameters, which a race with an
/// upload would show.
class TrainingRun {
 public:
  explicit TrainingRun(const Case& c)
      : case_(c),
        entry_(find_schedule(c.schedule)),
        machine_(make_emulated_machine(options(c))),
        layout_(parameters(), c.chunk_elements),
        runtime_(*machine_, layout_, spec(), OptimizerKind::adamw,
                 {{1e-2, 0.9, 0.95, 1e-8, 0.0}, {1e-2, 0.9, 0.95, 1e-8, 0.1}}),
        schedule_(entry_.make(runtime_)) {
    auto* working = runtime_.store().working().as<float>();
    for (std::int64_t i = 0; i < layout_.padded_elements(); ++i) working[i] = std::sin(static_cast<float>(i) * 0.1F);
    for (std::size_t p = 0; p < layout_.parameters().size(); ++p) runtime_.load_masters(static_cast<std::int64_t>(p));
  }

  Outcome train() {
    for (std::int64_t step = 0; step < case_.steps; ++step) {
      for (std::int64_t m = 0; m < case_.micro_batches; ++m) backward(step, m);
      const StepDecision decision = schedule_->step({1.0 / static_cast<double>(case_.micro_batches), case_.clip_norm});
      if (!decision.finite) runtime_.wait_discard_gradients();
      out_.norms.push_back(decision.grad_norm);
      out_.finite.push_back(decision.finite);
    }
    runtime_.wait_all();
    read_back();
    return out_;
  }

 private:
  static MachineOptions options(const Case& c) {
    MachineOptions out;
    out.threads = c.threads;
    out.delay = c.delay;
    return out;
  }

  StateSpec spec() const {
    StateSpec out;
    out.placement.assign(layout_.chunks().size(), entry_.placement);
    out.device_slots = out.pinned_slots = entry_.stages ? case_.slots : 0;
    return out;
  }

  // What forward and backward would read: the sum of the chunk's working parameters goes into every gradient.
  double forward() {
    double sum = 0;
    for (std::int64_t c = 0; c < static_cast<std::int64_t>(layout_.chunks().size()); ++c) {
      runtime_.wait_parameters(c);
      const float* values = runtime_.store().working(c).as<const float>();
      for (const Segment& s : layout_.chunk_segments(c)) {  // not the padding between parameters: nobody reads that
        for (std::int64_t i = 0; i < s.count; ++i) sum += values[s.chunk_offset + i];
      }
    }
    return sum;
  }

  void backward(std::int64_t step, std::int64_t micro_batch) {
    const double context = forward();
    std::vector<std::int64_t> order(layout_.parameters().size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(order.size() - 1 - i);
    std::mt19937 random(case_.order_seed + static_cast<unsigned>(step * 16 + micro_batch));
    if (case_.order_seed != 0) std::shuffle(order.begin(), order.end(), random);
    schedule_->begin_backward(micro_batch + 1 == case_.micro_batches);
    for (std::int64_t p : order) {
      if (case_.uneven && (p + step + micro_batch) % 3 == 0) continue;
      std::vector<float> gradient(static_cast<std::size_t>(layout_.parameters()[static_cast<std::size_t>(p)].numel()));
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        gradient[i] =
            static_cast<float>(std::cos(static_cast<double>(i + 1) * (static_cast<double>(p) + 0.3) + context) * 0.1);
      }
      if (step == case_.infinite_step && p == 4) gradient[4099] = std::numeric_limits<float>::infinity();
      schedule_->gradient_ready({p, reinterpret_cast<const std::byte*>(gradient.data())});
      std::fill(gradient.begin(), gradient.end(), std::nanf(""));  // the caller's memory may be reused at once
    }
    schedule_->end_backward();
  }

  void read_back() {
    for (const Segment& s : layout_.segments()) {
      const auto append = [&](std::vector<float>& to, const View& from) {
        const float* begin = from.as<const float>() + s.chunk_offset;
        to.insert(to.end(), begin, begin + s.count);
      };
      append(out_.working, runtime_.store().working(s.chunk));
      append(out_.masters, runtime_.store().master(s.chunk));
      append(out_.first, runtime_.store().optimizer_state(s.chunk, 0));
      append(out_.second, runtime_.store().optimizer_state(s.chunk, 1));
    }
    for (std::size_t p = 0; p < layout_.parameters().size(); ++p)
      out_.updates.push_back(runtime_.updates(static_cast<std::int64_t>(p)));
  }

  const Case case_;
  const ScheduleEntry& entry_;
  std::unique_ptr<Machine> machine_;
  Layout layout_;
  Runtime runtime_;
  std::unique_ptr<Schedule> schedule_;
  Outcome out_;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_same(const Outcome& expected, const Outcome& actual) {
  EXPECT_TRUE(same(expected.working, actual.working));
  EXPECT_TRUE(same(expected.masters, actual.masters));
  EXPECT_TRUE(same(expected.first, actual.first));
  EXPECT_TRUE(same(expected.second, actual.second));
  EXPECT_EQ(expected.finite, actual.finite);
  EXPECT_EQ(expected.updates, actual.updates);
  for (std::size_t i = 0; i < expected.norms.size(); ++i) {
    if (expected.finite[i]) {
      EXPECT_EQ(expected.norms[i], actual.norms[i]);
    }
  }
}

Outcome reference(Case c) {
  c.schedule = "resident";
  c.chunk_elements = 1 << 20;
  c.threads = 1;
  c.order_seed = 0;
  c.delay = {};
  return TrainingRun(c).train();
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleEntry& entry : schedules()) names.emplace_back(entry.name);
  return names;
}

class EverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, EverySchedule, testing::ValuesIn(schedule_names()));

TEST_P(EverySchedule, EndsInTheBitsOfTheResidentRun) {
  int cells = 0;
  for (bool uneven : {false, true}) {
    for (std::int64_t infinite_step : {-1, 2}) {
      Case base{.uneven = uneven, .infinite_step = infinite_step};
      const Outcome expected = reference(base);
      for (std::int64_t chunk : {1024, 2048, 5000, 1 << 16}) {
        for (std::int64_t slots : {1, 2, 5}) {
          for (int threads : {1, 3}) {
            for (unsigned order : {0U, 1U, 2U}) {
              Case c = base;
              c.schedule = GetParam();
              c.chunk_elements = chunk;
              c.slots = slots;
              c.threads = threads;
              c.order_seed = order;
              expect_same(expected, TrainingRun(c).train());
              ++cells;
            }
          }
        }
      }
      EXPECT_EQ(expected.finite[2], infinite_step != 2);
    }
  }
  EXPECT_EQ(cells, 2 * 2 * 4 * 3 * 2 * 3);
}

TEST(Delays, AThousandSeededSchedulesChangeNoBit) {
  Case base{.steps = 3, .uneven = true, .infinite_step = 1};
  const Outcome expected = reference(base);
  for (unsigned seed = 1; seed <= 1000; ++seed) {
    Case c = base;
    c.slots = 1 + seed % 3;
    c.threads = 1 + static_cast<int>(seed % 2);
    c.chunk_elements = 1024 * (1 + seed % 5);
    c.order_seed = seed;
    const auto random = std::make_shared<std::mt19937>(seed);
    const auto mutex = std::make_shared<std::mutex>();
    c.delay = [random, mutex](const std::string&, const Op&) {
      unsigned draw = 0;
      {
        const std::scoped_lock lock(*mutex);
        draw = (*random)();
      }
      if (draw % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 8 % 60));
      if (draw % 8 == 1) std::this_thread::yield();
    };
    expect_same(expected, TrainingRun(c).train());
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(Decision, ClipsAsPyTorchDoesAndRefusesWhatIsNotFinite) {
  const StepDecision free = decide({4.0, true}, {1.0, 0});
  EXPECT_EQ(free.grad_norm, 2.0);
  EXPECT_EQ(free.scale.grad_factor, 1.0F);
  EXPECT_EQ(decide({4.0, true}, {1.0, 1.0}).scale.grad_factor, static_cast<float>(1.0 / (2.0 + 1e-6)));
  EXPECT_EQ(decide({4.0, true}, {1.0, 5.0}).scale.grad_factor, 1.0F);
  EXPECT_EQ(decide({4.0, true}, {0.25, 5.0}).scale.grad_factor, 0.25F);
  EXPECT_FALSE(decide({std::numeric_limits<double>::infinity(), false}, {1.0, 1.0}).finite);
}

TEST(Schedules, AnUnknownNameListsThemAll) {
  try {
    find_schedule("zero_infinity");
    FAIL() << "an unknown schedule was found";
  } catch (const InvalidArgument& error) {
    for (const ScheduleEntry& entry : schedules())
      EXPECT_NE(std::string(error.what()).find(entry.name), std::string::npos);
  }
}

TEST(Failures, AnOpThatFailsReachesTheStepAndLeavesNothingRunning) {
  for (const char* where : {"gradients down", "accumulate", "norm"}) {
    Case c{.steps = 1};
    c.delay = [where](const std::string&, const Op& op) {
      if (std::string(op.name) == where && op.index == 1) throw std::runtime_error("injected");
    };
    TrainingRun run(c);
    EXPECT_THROW(run.train(), std::runtime_error) << where;
  }
}

}  // namespace
}  // namespace spillway
