// SPDX-License-Identifier: Apache-2.0
#include "spillway/runtime/virtual_machine.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/runtime/runtime.h"

namespace spillway {
namespace {

std::vector<GradientNorm> ask(Oracle& oracle, int times) {
  std::vector<GradientNorm> answers;
  for (int i = 0; i < times; ++i) {
    answers.push_back(oracle.gradient_norm([]() -> GradientNorm { throw std::logic_error("memory was read"); }));
  }
  return answers;
}

TEST(Oracle, OfARealMachineReadsMemory) {
  const auto machine = make_emulated_machine({});
  EXPECT_EQ(machine->oracle().gradient_norm([] { return GradientNorm{42, true}; }), (GradientNorm{42, true}));
}

TEST(Oracle, SeededAnswersAreTheSameForTheSameSeedAndWithinTheirBounds) {
  const OracleOptions options{.norm = 2, .spread = 0.5, .not_finite = 0.25, .seed = 9};
  const auto answers = ask(*make_seeded_oracle(options), 4000);
  EXPECT_EQ(answers, ask(*make_seeded_oracle(options), 4000));
  OracleOptions other = options;
  other.seed = 10;
  EXPECT_NE(answers, ask(*make_seeded_oracle(other), 4000));
  int not_finite = 0;
  double least = 1e9, most = 0;
  for (const GradientNorm& answer : answers) {
    not_finite += !answer.finite;
    if (!answer.finite) continue;
    least = std::min(least, answer.squared);
    most = std::max(most, answer.squared);
  }
  EXPECT_NEAR(not_finite, 1000, 100);
  EXPECT_GE(least, 1.0);
  EXPECT_LT(least, 1.1);
  EXPECT_LT(most, 9.0);
  EXPECT_GT(most, 8.5);
}

TEST(Oracle, GivesRecordedAnswersFirst) {
  const std::vector<GradientNorm> recorded{{4, true}, {0, false}};
  const auto oracle = make_seeded_oracle({.first = recorded, .norm = 3});
  EXPECT_EQ(ask(*oracle, 3), (std::vector<GradientNorm>{recorded[0], recorded[1], {9, true}}));
}

TEST(Oracle, RefusesWhatIsNoNormOrProbability) {
  EXPECT_THROW(make_seeded_oracle({.norm = -1}), InvalidArgument);
  EXPECT_THROW(make_seeded_oracle({.spread = 1.5}), InvalidArgument);
  EXPECT_THROW(make_seeded_oracle({.not_finite = -0.1}), InvalidArgument);
}

TEST(VirtualMachine, CountsBytesAgainstCapacitiesAndHoldsNone) {
  const auto machine = make_virtual_machine({.device_memory = Bytes{std::int64_t{1} << 50}});
  const auto pool = machine->make_pool(Tier::device, {std::int64_t{3} << 48});
  const View view = pool->allocate({std::int64_t{3} << 48}, MemoryUse::masters);
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(machine->ledger(Tier::device)->peak().value, std::int64_t{3} << 48);
  const auto second = machine->make_pool(Tier::device, {std::int64_t{3} << 48});
  EXPECT_THROW(second->allocate({std::int64_t{3} << 48}, MemoryUse::gradients), OutOfMemory);
  EXPECT_THROW(make_virtual_machine({.device_memory = Bytes{0}}), InvalidArgument);
  EXPECT_EQ(to_string(machine->kind()), "virtual");
}

/// A run of one chunk whose masters lie in `tier`.
class VirtualRuntime : public testing::TestWithParam<DType> {
 protected:
  Runtime make(Tier tier) {
    StateSpec spec;
    spec.working = GetParam();
    spec.placement = {ChunkPlacement::all(tier)};
    spec.device_slots = spec.pinned_slots = spec.upload_slots = 1;
    return {*machine, layout, spec, OptimizerKind::adamw, {Hyperparameters{}}};
  }

  std::unique_ptr<VirtualMachine> machine = make_virtual_machine({});
  Layout layout{{{"a", {64, 64}, 0}, {"b", {32}, 0}}, 1 << 20};
};
INSTANTIATE_TEST_SUITE_P(Types, VirtualRuntime, testing::Values(DType::f32, DType::bf16));

TEST_P(VirtualRuntime, EveryVerbRecordsAndTouchesNoMemory) {
  for (Tier tier : {Tier::device, Tier::pinned}) {
    Runtime runtime = make(tier);
    runtime.load_masters(0);
    const float* const no_values = nullptr;
    runtime.write({StateRole::Kind::master}, 1, no_values);
    std::vector<const Segment*> segments;
    for (const Segment& segment : layout.segments()) segments.push_back(&segment);
    if (tier == Tier::device) {
      for (const Segment* segment : segments) static_cast<void>(runtime.accumulate(*segment, {segment->parameter}));
    } else {
      Slot& device = runtime.device_slots().next();
      Slot& pinned = runtime.pinned_slots().next();
      const Ticket staged = runtime.stage(*segments[1], {1}, device, runtime.stage(*segments[0], {0}, device, {}));
      static_cast<void>(runtime.accumulate(segments, pinned, runtime.copy_down(segments, device, pinned, staged)));
    }
    EXPECT_EQ(runtime.wait_norm(), (GradientNorm{1, true}));
    EXPECT_TRUE(runtime.describe_non_finite(3).empty());
    runtime.begin_update();
    static_cast<void>(runtime.copy_up(0, runtime.update(0, {})));
    runtime.end_update();
    runtime.wait_parameters(0);
    runtime.wait_all();
    EXPECT_TRUE(runtime.wait_idle());
    runtime.wait_discard_gradients();
    EXPECT_EQ(runtime.updates(0), 1);
    EXPECT_EQ(machine->ledger(tier)->used()[MemoryUse::gradients],
              Pool::padded({(4096 + 1024) * 4}) + Pool::kAlignment);
  }
}

TEST_P(VirtualRuntime, WaitsAreEdgesToWhatFollows) {
  Runtime runtime = make(Tier::device);
  const Ticket accumulated = runtime.accumulate(layout.segments()[0], {0});
  static_cast<void>(runtime.wait_norm());
  runtime.begin_update();
  const Ticket updated = runtime.update(0, {});
  runtime.wait_parameters(0);
  const auto waits = machine->graph().waits();
  ASSERT_EQ(waits.size(), 2U);
  EXPECT_EQ(std::string(machine->graph().ops()[static_cast<std::size_t>(waits[0].op)].name), "norm");
  EXPECT_EQ(waits[0], (RecordedWait{accumulated.op() + 1, updated.op(), RecordedWait::Side::host}));
  EXPECT_EQ(waits[1], (RecordedWait{updated.op(), updated.op() + 1, RecordedWait::Side::compute}));
}

}  // namespace
}  // namespace spillway
