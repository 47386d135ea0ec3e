// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/chunk_store.h"

#include <functional>

#include "spillway/core/error.h"

namespace spillway {
namespace {

// Called for every piece of memory a run keeps, in the order of allocation: `place` receives its tier, use and bytes.
// Plan and store both walk this, so that they cannot differ.
struct StateWalker {
  const Layout& layout;
  const StateSpec& spec;
  std::function<View(Tier, MemoryUse, Bytes)> place;

  View working() const {
    return place(Tier::device, MemoryUse::parameters, {layout.padded_elements() * size_of(spec.working)});
  }
  View frozen() const {
    return place(Tier::device, MemoryUse::parameters, {spec.frozen_elements * size_of(spec.working)});
  }
  View fp32(Tier tier, MemoryUse use, std::int64_t chunk) const {
    return place(tier, use, {layout.chunks()[static_cast<std::size_t>(chunk)].count * size_of(DType::f32)});
  }
  View slot(Tier tier) const {
    return place(tier, MemoryUse::staging, {layout.chunk_elements() * size_of(spec.working)});
  }
};

}  // namespace

MemoryPlan plan_state(const Layout& layout, const StateSpec& spec) {
  MemoryPlan plan;
  const StateWalker walk{layout, spec, [&](Tier tier, MemoryUse use, Bytes bytes) {
                           plan[tier][use] += Pool::padded(bytes);
                           return View{};
                         }};
  check(spec.placement.size() == layout.chunks().size(), "a placement names every chunk");
  walk.working();
  walk.frozen();
  for (std::int64_t c = 0; c < static_cast<std::int64_t>(layout.chunks().size()); ++c) {
    const ChunkPlacement& at = spec.placement[static_cast<std::size_t>(c)];
    if (!spec.master_is_working(at.master)) walk.fp32(at.master, MemoryUse::masters, c);
    walk.fp32(at.gradient, MemoryUse::gradients, c);
    for (std::int64_t k = 0; k < spec.optimizer_states; ++k)
      walk.fp32(at.optimizer_state, MemoryUse::optimizer_states, c);
  }
  for (std::int64_t i = 0; i < spec.device_slots; ++i) walk.slot(Tier::device);
  for (std::int64_t i = 0; i < spec.pinned_slots + spec.upload_slots; ++i) walk.slot(Tier::pinned);
  return plan;
}

Pool& StatePools::at(Tier tier) {
  std::unique_ptr<Pool>& pool = by_tier[static_cast<std::size_t>(tier)];
  check(pool != nullptr, "a tier that is used has a pool");
  return *pool;
}

ChunkStore::ChunkStore(const Layout& layout, StateSpec spec, StatePools pools)
    : layout_(layout), spec_(std::move(spec)), pools_(std::move(pools)) {
  const StateWalker walk{layout, spec_,
                         [&](Tier tier, MemoryUse use, Bytes bytes) { return pools_.at(tier).allocate(bytes, use); }};
  working_ = walk.working();
  frozen_ = walk.frozen();
  for (std::int64_t c = 0; c < static_cast<std::int64_t>(layout.chunks().size()); ++c) {
    const ChunkPlacement& at = placement(c);
    Roles roles;
    roles.master = spec_.master_is_working(at.master) ? working(c) : walk.fp32(at.master, MemoryUse::masters, c);
    roles.gradient = walk.fp32(at.gradient, MemoryUse::gradients, c);
    for (std::int64_t k = 0; k < spec_.optimizer_states; ++k) {
      roles.states.push_back(walk.fp32(at.optimizer_state, MemoryUse::optimizer_states, c));
    }
    roles_.push_back(std::move(roles));
  }
  for (std::int64_t i = 0; i < spec_.device_slots; ++i) device_slots_.push_back({walk.slot(Tier::device)});
  for (std::int64_t i = 0; i < spec_.pinned_slots; ++i) pinned_slots_.push_back({walk.slot(Tier::pinned)});
  for (std::int64_t i = 0; i < spec_.upload_slots; ++i) upload_slots_.push_back({walk.slot(Tier::pinned)});
}

View ChunkStore::working(std::int64_t chunk) const {
  const Chunk& c = layout_.chunks()[static_cast<std::size_t>(chunk)];
  const std::int64_t size = size_of(spec_.working);
  return working_.slice({c.begin * size}, {c.count * size});
}

}  // namespace spillway
