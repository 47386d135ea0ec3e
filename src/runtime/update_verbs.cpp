// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <utility>

#include "runtime/runtime_impl.h"

namespace spillway {
namespace {

/// A segment and the scalars of its step, fixed when the op is submitted.
struct UpdateItem {
  const Segment* segment;
  kernels::AdamScalars scalars;
};

}  // namespace

void Runtime::begin_update() {
  for (ParameterState& parameter : parameters_) parameter.updates += parameter.has_gradient;
}

std::vector<const Segment*> Runtime::updated_segments(std::int64_t chunk) const {
  std::vector<const Segment*> out;
  for (const Segment& segment : layout_.chunk_segments(chunk)) {
    if (segments_[static_cast<std::size_t>(index_of(segment))].accumulated) out.push_back(&segment);
  }
  return out;
}

std::byte* Runtime::working_copy_target(std::int64_t chunk) {
  if (store_->spec().working == DType::f32) return nullptr;
  if (on_device(store_->placement(chunk).master)) return store_->working(chunk).data;
  check(upload_slot_ == nullptr, "an update's working copy is sent before the next update");
  upload_slot_ = &upload_slots_.next();
  return upload_slot_->view.data;
}

Ticket Runtime::update(std::int64_t chunk, StepScale scale) {
  const ChunkPlacement& at = store_->placement(chunk);
  std::vector<UpdateItem> items;
  const std::vector<const Segment*> segments = updated_segments(chunk);
  for (const Segment* segment : segments) {
    const auto parameter = static_cast<std::size_t>(segment->parameter);
    const Hyperparameters& h = hyperparameters_[static_cast<std::size_t>(layout_.parameters()[parameter].group)];
    items.push_back({segment, kernels::adam_scalars(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay,
                                                    optimizer_ == OptimizerKind::adamw, parameters_[parameter].updates,
                                                    scale.grad_factor)});
  }
  std::byte* copy = working_copy_target(chunk);
  const kernels::Element copy_type = copy == nullptr ? kernels::Element::none : element_of(store_->spec().working);
  ThreadTeam& team = on_device(at.master) ? machine_.device_team() : machine_.cpu_team();
  auto body = [this, &team, copy, copy_type, size = size_of(store_->spec().working), items = std::move(items),
               p = store_->master(chunk).as<float>(), m = store_->optimizer_state(chunk, 0).as<float>(),
               v = store_->optimizer_state(chunk, 1).as<float>(),
               g = store_->gradient(chunk).as<const float>()](StreamRef) {
    for_slices(team, items, [&](const UpdateItem& item, std::int64_t begin, std::int64_t n, std::int64_t) {
      const kernels::KeepDenormals keep;
      const std::int64_t i = item.segment->chunk_offset + begin;
      impl_->kernels.adam(item.scalars, p + i, m + i, v + i, g + i, kernels::Element::f32,
                          copy == nullptr ? nullptr : copy + i * size, copy_type, n);
    });
  };
  std::vector<Ticket> after{gradient_ops_[static_cast<std::size_t>(chunk)], uploads_[static_cast<std::size_t>(chunk)]};
  if (upload_slot_ != nullptr) after.push_back(upload_slot_->free);
  Ticket& newest = updates_[static_cast<std::size_t>(chunk)];
  newest = lane_of(at.master).submit(
      {"update", chunk, OpKind::optimizer, static_cast<double>(elements(segments)), std::move(after), std::move(body)});
  return newest;
}

Ticket Runtime::copy_up(std::int64_t chunk, Ticket updated) {
  if (on_device(store_->placement(chunk).master)) return updated;
  const std::int64_t size = size_of(store_->spec().working);
  Slot* const slot = std::exchange(upload_slot_, nullptr);
  auto segments = updated_segments(chunk);
  const auto bytes = static_cast<double>(elements(segments) * size);
  auto body = [size, to = store_->working(chunk).data,
               from = slot == nullptr ? store_->master(chunk).data : slot->view.data,
               list = std::move(segments)](StreamRef) {
    for (const Segment* segment : list) {
      const std::int64_t offset = segment->chunk_offset * size;
      std::memcpy(to + offset, from + offset, static_cast<std::size_t>(segment->count * size));
    }
  };
  // Compute so far may still read the old values.
  const Ticket read = machine_.compute().mark("before upload", chunk, 0);
  Ticket& newest = uploads_[static_cast<std::size_t>(chunk)];
  newest = machine_.upload().submit(
      {"parameters up", chunk, OpKind::copy, bytes, {std::move(updated), read}, std::move(body)});
  if (slot != nullptr) slot->free = newest;
  return newest;
}

void Runtime::end_update() {
  for (ParameterState& parameter : parameters_) parameter.has_gradient = false;
  for (SegmentState& segment : segments_) segment = {};
}

}  // namespace spillway
