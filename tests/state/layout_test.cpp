// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/layout.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/state/chunk_store.h"

namespace spillway {
namespace {

std::vector<ParameterInfo> odd_parameters() {
  return {{"tiny", {3}, 0},        {"empty", {0, 5}, 0}, {"scalar", {}, 0},
          {"matrix", {70, 33}, 0}, {"grain", {1024}, 0}, {"large", {5000}, 0}};
}

TEST(Layout, EveryElementIsInExactlyOneSegmentAndEveryStartIsAGrain) {
  for (std::int64_t chunk : {1, 1024, 1025, 3000, 4096, 1 << 20}) {
    const Layout layout(odd_parameters(), chunk);
    EXPECT_EQ(layout.chunk_elements() % kGrainElements, 0);
    std::int64_t flat = 0;
    for (const Chunk& c : layout.chunks()) {
      EXPECT_EQ(c.begin, flat);
      EXPECT_EQ(c.count % kGrainElements, 0);
      EXPECT_GT(c.count, 0);
      flat += c.count;
    }
    EXPECT_EQ(flat, layout.padded_elements());
    for (std::size_t p = 0; p < layout.parameters().size(); ++p) {
      EXPECT_EQ(layout.offset(static_cast<std::int64_t>(p)) % kGrainElements, 0);
      std::int64_t covered = 0;
      for (const Segment& s : layout.parameter_segments(static_cast<std::int64_t>(p))) {
        EXPECT_EQ(s.parameter, static_cast<std::int64_t>(p));
        EXPECT_EQ(s.parameter_offset, covered);
        EXPECT_EQ(s.parameter_offset % kGrainElements, 0);
        EXPECT_EQ(s.chunk_offset % kGrainElements, 0);
        EXPECT_EQ(layout.chunks()[static_cast<std::size_t>(s.chunk)].begin + s.chunk_offset,
                  layout.offset(static_cast<std::int64_t>(p)) + covered);
        covered += s.count;
      }
      EXPECT_EQ(covered, layout.parameters()[p].numel());
    }
    std::int64_t in_chunks = 0;
    for (std::size_t c = 0; c < layout.chunks().size(); ++c) {
      for (const Segment& s : layout.chunk_segments(static_cast<std::int64_t>(c))) {
        EXPECT_EQ(s.chunk, static_cast<std::int64_t>(c));
        EXPECT_LE(s.chunk_offset + s.count, layout.chunks()[c].count);
        in_chunks += s.count;
      }
    }
    EXPECT_EQ(in_chunks, 3 + 1 + 70 * 33 + 1024 + 5000);
  }
}

TEST(Layout, CountsPast32BitsAndRefusesWhatOverflows) {
  const Layout layout({{"huge", {1 << 20, 1 << 14}, 0}}, std::int64_t{1} << 30);
  EXPECT_EQ(layout.padded_elements(), std::int64_t{1} << 34);
  EXPECT_EQ(layout.chunks().size(), 16U);
  EXPECT_EQ(layout.segments().back().parameter_offset, std::int64_t{15} << 30);
  EXPECT_THROW(Layout({{"x", {std::int64_t{1} << 40, std::int64_t{1} << 40}, 0}}, 1024), InvalidArgument);
  EXPECT_THROW(Layout({{"x", {-1}, 0}}, 1024), InvalidArgument);
  EXPECT_THROW(Layout(odd_parameters(), 0), InvalidArgument);
}

TEST(Layout, OfNothingIsEmpty) {
  const Layout layout({}, 1024);
  EXPECT_TRUE(layout.chunks().empty());
  EXPECT_EQ(layout.padded_elements(), 0);
}

TEST(Layout, DefaultChunksAreFromSixtyFourKiToSixteenMi) {
  EXPECT_EQ(default_chunk_elements(1000), 64 * 1024);
  EXPECT_EQ(default_chunk_elements(std::int64_t{70} << 30), 16 << 20);
  EXPECT_EQ(default_chunk_elements(std::int64_t{32} << 20), 1 << 20);
}

TEST(StatePlan, IsSixteenBytesAnElementWhereverTheyAre) {
  const Layout layout({{"w", {1 << 20}, 0}}, 1 << 18);
  StateSpec resident;
  resident.placement.assign(layout.chunks().size(), ChunkPlacement::all(Tier::device));
  constexpr std::int64_t kGap = 512;  // after each role's arrays
  EXPECT_EQ(plan_state(layout, resident)[Tier::device].total().value, (16 << 20) + 3 * kGap);
  StateSpec offloaded;
  offloaded.placement.assign(layout.chunks().size(), ChunkPlacement::all(Tier::pinned));
  offloaded.device_slots = 2;
  offloaded.pinned_slots = 3;
  const MemoryPlan plan = plan_state(layout, offloaded);
  EXPECT_EQ(plan[Tier::device].total().value, (4 << 20) + 2 * (1 << 20));
  EXPECT_EQ(plan[Tier::pinned].total().value, (16 << 20) + 3 * (1 << 20) + 4 * kGap);
  EXPECT_EQ(plan[Tier::pinned][MemoryUse::optimizer_states].value, (8 << 20) + 2 * kGap);
}

TEST(ChunkStore, TheArraysOfAnUpdateStandAtDifferentOffsetsInAPage) {
  const Layout layout({{"w", {1 << 16}, 0}}, 1 << 14);
  for (DType working : {DType::f32, DType::bf16}) {
    StateSpec spec;
    spec.working = working;
    spec.placement.assign(layout.chunks().size(), ChunkPlacement::all(Tier::pinned));
    const MemoryPlan plan = plan_state(layout, spec);
    MemoryLedger device(Tier::device, Bytes{-1}), pinned(Tier::pinned, Bytes{-1});
    StatePools pools;
    for (MemoryLedger* ledger : {&device, &pinned}) {
      const Bytes size = plan[ledger->tier()].total();
      pools.by_tier[static_cast<std::size_t>(ledger->tier())] =
          std::make_unique<Pool>(*ledger, make_host_arena(size), size);
    }
    const ChunkStore store(layout, spec, std::move(pools));
    EXPECT_EQ(pinned.used(), plan[Tier::pinned]);
    for (std::int64_t c = 0; c < 4; ++c) {
      std::set<std::uintptr_t> offsets;
      for (const View& view :
           {store.master(c), store.gradient(c), store.optimizer_state(c, 0), store.optimizer_state(c, 1)}) {
        EXPECT_EQ(view.size.value, 4 << 14);
        offsets.insert(reinterpret_cast<std::uintptr_t>(view.data) % 4096);
      }
      EXPECT_EQ(offsets.size(), 4U);
    }
  }
}

}  // namespace
}  // namespace spillway
