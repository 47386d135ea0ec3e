// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/chunk_store.h"

#include <algorithm>
#include <functional>

#include "spillway/core/error.h"

namespace spillway {
namespace {

// Called for every piece of memory a run keeps, in the order of allocation: `place` receives its tier, use and bytes.
// Plan and store both walk this, so that they cannot differ.
class StateWalker {
 public:
  const Layout& layout;
  const StateSpec& spec;
  std::function<View(Tier, MemoryUse, Bytes)> place;

  View working() const {
    return place(Tier::device, MemoryUse::parameters, {layout.padded_elements() * size_of(spec.working)});
  }
  View frozen() const {
    return place(Tier::device, MemoryUse::parameters, {spec.frozen_elements * size_of(spec.working)});
  }
  View device_slot() const {
    return place(Tier::device, MemoryUse::staging, {layout.chunk_elements() * size_of(spec.working)});
  }
  View pinned_slot() const {
    const std::int64_t sums = layout.partition().shared() ? layout.most_kept_elements() * 4 : 0;
    const bool own = !layout.partition().shared() || spec.reduce_last;
    const std::int64_t gradients = own ? layout.chunk_elements() * size_of(spec.working) : 0;
    return place(Tier::pinned, MemoryUse::staging, {std::max(sums, gradients)});
  }
  View upload_slot() const {
    return place(Tier::pinned, MemoryUse::staging, {layout.most_kept_elements() * size_of(spec.working)});
  }
  StagingSlot reduce_slot() const {
    const std::int64_t others = layout.partition().ranks - 1;
    const View sum = place(Tier::device, MemoryUse::staging, {layout.most_kept_elements() * 4});
    return {sum, place(Tier::device, MemoryUse::staging,
                       {others * layout.most_owned_elements() * size_of(spec.piece_type())})};
  }
  View piece_slot() const {
    return place(Tier::device, MemoryUse::staging, {layout.chunk_elements() * size_of(spec.piece_type())});
  }

  View grain_sums(Tier tier) const {
    const bool needed =
        !spec.host_reads_device && std::any_of(spec.placement.begin(), spec.placement.end(),
                                               [](const auto& at) { return at.gradient == Tier::device; });
    if (!needed) return {};
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(double));
    return place(tier, MemoryUse::staging, {layout.padded_elements() / kGrainElements * kBytes});
  }

  /// The arrays of all chunks, role by role: visit(chunk, use, k, view).
  template <class Visit>
  void roles(const Visit& visit) const {
    role(MemoryUse::masters, 0, visit);
    role(MemoryUse::gradients, 0, visit);
    for (std::int64_t k = 0; k < spec.optimizer_states; ++k) role(MemoryUse::optimizer_states, k, visit);
  }

 private:
  static Tier tier_of(const ChunkPlacement& at, MemoryUse use) {
    return use == MemoryUse::masters ? at.master : use == MemoryUse::gradients ? at.gradient : at.optimizer_state;
  }

  template <class Visit>
  void role(MemoryUse use, std::int64_t k, const Visit& visit) const {
    std::array<bool, 4> used{};
    for (std::size_t c = 0; c < layout.chunks().size(); ++c) {
      const Tier tier = tier_of(spec.placement[c], use);
      if (use == MemoryUse::masters && spec.master_is_working(tier)) continue;
      used[static_cast<std::size_t>(tier)] = true;
      const bool gradients = use == MemoryUse::gradients;
      const std::int64_t count =
          gradients && spec.reduce_last ? layout.chunks()[c].count : layout.kept(static_cast<std::int64_t>(c)).count;
      visit(c, use, k, place(tier, use, {count * size_of(gradients ? spec.gradient : DType::f32)}));
    }
    // An update reads and writes the same elements of four arrays at once. Chunks are whole pages, so without a gap
    // between roles all four would stand at one offset in a page, which processors may take for one address: 0.4 to 0.7
    // of the speed at unlucky distances (docs/benchmarks.md).
    for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) {
      if (used[static_cast<std::size_t>(tier)]) place(tier, use, Pool::kAlignment);
    }
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
  walk.roles([](std::size_t, MemoryUse, std::int64_t, const View&) {});
  walk.grain_sums(Tier::device);
  walk.grain_sums(Tier::pinned);
  for (std::int64_t i = 0; i < spec.device_slots; ++i) walk.device_slot();
  for (std::int64_t i = 0; i < spec.reduce_slots; ++i) walk.reduce_slot();
  for (std::int64_t i = 0; i < spec.piece_slots; ++i) walk.piece_slot();
  for (std::int64_t i = 0; i < spec.pinned_slots; ++i) walk.pinned_slot();
  for (std::int64_t i = 0; i < spec.upload_slots; ++i) walk.upload_slot();
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
  for (std::size_t c = 0; c < layout.chunks().size(); ++c) {
    // The fp32 master of a chunk on the device is its working parameters.
    const auto chunk = static_cast<std::int64_t>(c);
    const Shard kept = layout.kept(chunk);
    const View master = spec_.working == DType::f32 ? working(chunk).slice({kept.begin * 4}, {kept.count * 4}) : View{};
    roles_.push_back({master, {}, {}, {}});
    roles_.back().states.resize(static_cast<std::size_t>(spec_.optimizer_states));
  }
  walk.roles([this](std::size_t chunk, MemoryUse use, std::int64_t k, const View& view) {
    Roles& roles = roles_[chunk];
    View& role = use == MemoryUse::masters     ? roles.master
                 : use == MemoryUse::gradients ? roles.own_gradient
                                               : roles.states[static_cast<std::size_t>(k)];
    role = view;
    if (use != MemoryUse::gradients) return;
    const Shard kept = layout_.kept(static_cast<std::int64_t>(chunk));
    const std::int64_t begin = spec_.reduce_last ? kept.begin : 0, size = size_of(spec_.gradient);
    roles.gradient = view.slice({begin * size}, {kept.count * size});
  });
  device_sums_ = walk.grain_sums(Tier::device);
  host_sums_ = walk.grain_sums(Tier::pinned);
  for (std::int64_t i = 0; i < spec_.device_slots; ++i) device_slots_.push_back({walk.device_slot()});
  for (std::int64_t i = 0; i < spec_.reduce_slots; ++i) reduce_slots_.push_back(walk.reduce_slot());
  for (std::int64_t i = 0; i < spec_.piece_slots; ++i) piece_slots_.push_back({walk.piece_slot()});
  for (std::int64_t i = 0; i < spec_.pinned_slots; ++i) pinned_slots_.push_back({walk.pinned_slot()});
  for (std::int64_t i = 0; i < spec_.upload_slots; ++i) upload_slots_.push_back({walk.upload_slot()});
}

View ChunkStore::working(std::int64_t chunk) const {
  const Chunk& c = layout_.chunks()[static_cast<std::size_t>(chunk)];
  const std::int64_t size = size_of(spec_.working);
  return working_.slice({c.begin * size}, {c.count * size});
}

}  // namespace spillway
