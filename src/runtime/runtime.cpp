// SPDX-License-Identifier: Apache-2.0
#include "spillway/runtime/runtime.h"

#include <algorithm>
#include <utility>

#include "runtime/runtime_impl.h"

namespace spillway {

SlotRing::SlotRing(const std::vector<StagingSlot>& slots) {
  for (const StagingSlot& slot : slots) slots_.push_back({slot.view, {}, slot.pieces});
}

Slot& SlotRing::next() {
  check(!slots_.empty(), "a schedule that stages has slots");
  Slot& slot = slots_[turn_];
  turn_ = (turn_ + 1) % slots_.size();
  return slot;
}

Runtime::Runtime(Machine& machine, const Layout& layout, StateSpec spec, OptimizerKind optimizer,
                 std::vector<Hyperparameters> hyperparameters)
    : machine_(machine),
      layout_(layout),
      optimizer_(optimizer),
      hyperparameters_(std::move(hyperparameters)),
      spec_(std::move(spec)),
      device_slots_({}),
      pinned_slots_({}),
      upload_slots_({}),
      reduce_slots_({}),
      piece_slots_({}),
      parameters_(layout.parameters().size()),
      segments_(layout.kept_segments().size()),
      own_(spec_.reduce_last ? layout.segments().size() : 0),
      uploads_(layout.chunks().size()),
      updates_(layout.chunks().size()),
      gradient_ops_(layout.chunks().size()),
      impl_(std::make_unique<Impl>()) {
  for (const ChunkPlacement& at : spec_.placement) {
    require(
        at.gradient == at.master && at.master == at.optimizer_state,
        "a chunk's gradients, masters and optimizer states must be in one tier: the lane that updates them reads all");
  }
  require(spec_.gradient == DType::f32 || spec_.gradient == spec_.working,
          "gradients are accumulated in fp32 or in the working type");
  require(
      !spec_.reduce_last || (layout.partition().shared() && layout.partition().stage < 2),
      "gradients are reduced in the last micro-batch only between several ranks, at stage 0 or 1: at stage 2 a rank "
      "has no room for sums of its own");
  spec_.host_reads_device = machine.host_reads_device();
  make_store(spec_);
  const auto grains = static_cast<std::size_t>(layout.chunk_elements() / kGrainElements);
  impl_->sums.resize(layout.kept_segments().size());
  impl_->cpu_grain_sums.resize(grains);
  impl_->device_grain_sums.resize(grains);
}

void Runtime::make_store(const StateSpec& spec) {
  const MemoryPlan plan = plan_state(layout_, spec);
  StatePools pools;
  for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) {
    pools.by_tier[static_cast<std::size_t>(tier)] = machine_.make_pool(tier, plan[tier].total());
  }
  store_ = std::make_unique<ChunkStore>(layout_, spec, std::move(pools));
  device_slots_ = SlotRing(store_->device_slots());
  pinned_slots_ = SlotRing(store_->pinned_slots());
  upload_slots_ = SlotRing(store_->upload_slots());
  reduce_slots_ = SlotRing(store_->reduce_slots());
  piece_slots_ = SlotRing(store_->piece_slots());
  clear_states();
  own_on_device_.clear();
  if (!spec.reduce_last) return;
  for (std::size_t c = 0; c < layout_.chunks().size(); ++c)
    own_on_device_.push_back({store_->own_gradient(static_cast<std::int64_t>(c)), {}, {}});
}

// Host memory is zero when the system gives it; a device's is what was there before.
void Runtime::clear_states() {
  for (std::size_t c = 0; c < layout_.chunks().size(); ++c) {
    for (std::int64_t k = 0; k < spec_.optimizer_states; ++k) {
      const View state = store_->optimizer_state(static_cast<std::int64_t>(c), k);
      if (state.data == nullptr || state.size.value == 0 || host_reads(state)) continue;
      machine_.wait(machine_.compute().submit(
          {"clear states",
           static_cast<std::int64_t>(c),
           OpKind::elementwise,
           static_cast<double>(state.size.value),
           {},
           [&work = machine_.device_work(), state](StreamRef stream) { work.zero(stream, state.data, state.size); }}));
    }
  }
}

Runtime::~Runtime() {
  wait_idle();  // every op holds on to this object
}

bool Runtime::wait_idle() noexcept {
  // Lanes run in order, so each chunk's newest op of a kind is the last one.
  for (const Ticket& ticket : gradient_ops_) wait_quietly(machine_, ticket);
  for (const SlotRing* ring : {&device_slots_, &pinned_slots_, &upload_slots_, &reduce_slots_, &piece_slots_}) {
    for (const Slot& slot : ring->slots()) wait_quietly(machine_, slot.free);
  }
  bool well = true;
  for (const auto* tickets : {&updates_, &uploads_}) {
    for (const Ticket& ticket : *tickets) well = wait_quietly(machine_, ticket) && well;
  }
  return well;
}

Lane& Runtime::lane_of(Tier tier) {
  return on_device(tier) ? machine_.compute() : machine_.cpu();
}

bool Runtime::note_gradient(const Segment& segment, Sums sums) {
  if (sums == Sums::own) {
    parameters_[static_cast<std::size_t>(segment.parameter)].has_gradient = true;
    const auto index = static_cast<std::size_t>(&segment - layout_.segments().data());
    const bool first = !own_[index];
    own_[index] = true;
    return first;
  }
  // Ranks reduce every parameter; which had a gradient is noted where it is staged.
  if (!layout_.partition().shared()) parameters_[static_cast<std::size_t>(segment.parameter)].has_gradient = true;
  SegmentState& state = segments_[static_cast<std::size_t>(index_of(segment))];
  state.counted = false;
  return !std::exchange(state.accumulated, true);
}

void Runtime::wait_parameters(std::int64_t chunk) {
  machine_.compute().wait(updates_[static_cast<std::size_t>(chunk)]);
  machine_.compute().wait(uploads_[static_cast<std::size_t>(chunk)]);
}

void Runtime::wait_all() {
  machine_.wait(machine_.compute().mark("wait all", -1, 0));
  for (const auto* tickets : {&gradient_ops_, &updates_, &uploads_}) {
    for (const Ticket& ticket : *tickets) machine_.wait(ticket);
  }
  if (!layout_.partition().shared()) return;
  // A sum of which this rank keeps nothing is followed by no op of a chunk.
  for (const SlotRing* ring : {&device_slots_, &reduce_slots_, &piece_slots_}) {
    for (const Slot& slot : ring->slots()) machine_.wait(slot.free);
  }
}

}  // namespace spillway
