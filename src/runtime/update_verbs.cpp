// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "runtime/runtime_impl.h"

namespace spillway {
namespace {

/// A segment and the scalars of its step, fixed when the op is submitted.
struct UpdateItem {
  const Segment* segment;
  kernels::AdamScalars scalars;
};

/// A parameter's own rule, to be run in this op.
struct RuleItem {
  const UpdateRule* rule;
  RuleArrays arrays;
};

}  // namespace

void Runtime::begin_update() {
  for (ParameterState& parameter : parameters_) {
    parameter.updates += parameter.has_gradient;
    parameter.rule_submitted = false;
  }
}

std::vector<const Segment*> Runtime::updated_segments(std::int64_t chunk) const {
  std::vector<const Segment*> out;
  for (const Segment& segment : layout_.kept_segments_of_chunk(chunk)) {
    const bool accumulated = segments_[static_cast<std::size_t>(index_of(segment))].accumulated;
    if (accumulated && has_gradient(segment.parameter)) out.push_back(&segment);
  }
  return out;
}

std::byte* Runtime::working_copy_target(std::int64_t chunk) {
  if (spec_.working == DType::f32) return nullptr;
  if (on_device(store_->placement(chunk).master))
    return at_element(store_->working(chunk).data, kept_begin(chunk) * size_of(spec_.working));
  check(upload_slot_ == nullptr, "an update's working copy is sent before the next update");
  upload_slot_ = &upload_slots_.next();
  return upload_slot_->view.data;
}

Ticket Runtime::update(std::int64_t chunk, StepScale scale) {
  const std::vector<const Segment*> segments = updated_segments(chunk);
  if (segments.empty()) return {};  // all of it is other ranks'
  const ChunkPlacement& at = store_->placement(chunk);
  std::vector<UpdateItem> items;
  std::vector<RuleItem> rules;
  std::vector<UpdateItem> rounded;  // by a rule: only their working copy is left to write
  std::vector<Ticket> after{gradient_ops_[static_cast<std::size_t>(chunk)], uploads_[static_cast<std::size_t>(chunk)]};
  for (const Segment* segment : segments) {
    const auto parameter = static_cast<std::size_t>(segment->parameter);
    ParameterState& state = parameters_[parameter];
    if (state.rule) {
      rounded.push_back({segment, {}});
      if (std::exchange(state.rule_submitted, true)) continue;
      rules.push_back({&state.rule, rule_arrays(segment->parameter, scale.grad_factor)});
      // The rule writes the whole parameter, so masters of its other chunks must have left.
      for (const Segment& part : layout_.parameter_segments(segment->parameter)) {
        after.push_back(gradient_ops_[static_cast<std::size_t>(part.chunk)]);
        after.push_back(uploads_[static_cast<std::size_t>(part.chunk)]);
      }
      continue;
    }
    const Hyperparameters& h = hyperparameters_[static_cast<std::size_t>(layout_.parameters()[parameter].group)];
    items.push_back(
        {segment, kernels::adam_scalars(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay,
                                        optimizer_ == OptimizerKind::adamw, state.updates, scale.grad_factor)});
  }
  std::byte* copy = working_copy_target(chunk);
  if (copy == nullptr) rounded.clear();
  const kernels::Element copy_type = copy == nullptr ? kernels::Element::none : element_of(spec_.working);
  auto body = [place = workplace(machine_, at.master), copy, copy_type, size = size_of(spec_.working),
               gradient_type = spec_.gradient, items = std::move(items), rules = std::move(rules),
               rounded = std::move(rounded), p = store_->master(chunk).as<float>(),
               m = store_->optimizer_state(chunk, 0).as<float>(), v = store_->optimizer_state(chunk, 1).as<float>(),
               g = store_->gradient(chunk).data](StreamRef stream) {
    for (const RuleItem& item : rules) (*item.rule)(item.arrays);
    for_slices(place.team, items, [&](const UpdateItem& item, std::int64_t begin, std::int64_t n, std::int64_t) {
      const std::int64_t i = item.segment->chunk_offset + begin;
      place.work.adam(stream, item.scalars, p + i, m + i, v + i, g + i * size_of(gradient_type),
                      element_of(gradient_type), copy == nullptr ? nullptr : copy + i * size, copy_type, n);
    });
    for_slices(place.team, rounded, [&](const UpdateItem& item, std::int64_t begin, std::int64_t n, std::int64_t) {
      const std::int64_t i = item.segment->chunk_offset + begin;
      place.work.narrow(stream, copy + i * size, copy_type, p + i, n);
    });
  };
  if (upload_slot_ != nullptr) after.push_back(upload_slot_->free);
  Ticket& newest = updates_[static_cast<std::size_t>(chunk)];
  newest = lane_of(at.master).submit(
      {"update", chunk, OpKind::optimizer, static_cast<double>(elements(segments)), std::move(after), std::move(body)});
  return newest;
}

Ticket Runtime::copy_up(std::int64_t chunk, Ticket updated) {
  if (on_device(store_->placement(chunk).master)) return updated;
  const std::int64_t size = size_of(spec_.working);
  Slot* const slot = std::exchange(upload_slot_, nullptr);
  auto segments = updated_segments(chunk);
  if (segments.empty()) return updated;
  const auto bytes = static_cast<double>(elements(segments) * size);
  auto body = [&work = machine_.device_work(), size,
               to = at_element(store_->working(chunk).data, kept_begin(chunk) * size),
               from = slot == nullptr ? store_->master(chunk).data : slot->view.data,
               list = std::move(segments)](StreamRef stream) {
    for (const Segment* segment : list) {
      const std::int64_t offset = segment->chunk_offset * size;
      work.copy(stream, to + offset, from + offset, {segment->count * size});
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
  own_.assign(own_.size(), false);
  ranks_added_ = false;
}

}  // namespace spillway
