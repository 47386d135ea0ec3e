// SPDX-License-Identifier: Apache-2.0
#include "spillway/runtime/runtime.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/cpu_kernels.h"
#include "kernels/denormal_mode.h"
#include "kernels/exact_sum.h"
#include "runtime/slices.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

kernels::Element element_of(DType type) {
  switch (type) {
    case DType::f32:
      return kernels::Element::f32;
    case DType::bf16:
      return kernels::Element::bf16;
    case DType::f16:
      return kernels::Element::f16;
    default:
      throw InvalidArgument(fmt::format("model states cannot be {}", to_string(type)));
  }
}

/// A segment and what its part of an op needs, fixed when the op is submitted.
struct AccumulateItem {
  const Segment* segment;
  bool first;  // of this step: replaces what is there
};
struct NormItem {
  const Segment* segment;
  kernels::ExactSum* sum;
};
struct UpdateItem {
  const Segment* segment;
  kernels::AdamScalars scalars;
};

// For ops whose error was or will be reported by the call that needs them.
void wait_quietly(const Ticket& ticket) noexcept {
  try {
    ticket.wait();
  } catch (...) {
  }
}

std::int64_t elements(std::span<const Segment* const> segments) {
  std::int64_t count = 0;
  for (const Segment* segment : segments) count += segment->count;
  return count;
}

}  // namespace

struct Runtime::Impl {
  const kernels::CpuKernels& kernels = kernels::cpu_kernels();
  std::vector<kernels::ExactSum> sums;                    // one a segment: the square sum of its accumulated gradient
  std::vector<double> cpu_grain_sums, device_grain_sums;  // of one op: room for a chunk's grains
};

SlotRing::SlotRing(const std::vector<StagingSlot>& slots) {
  for (const StagingSlot& slot : slots) slots_.push_back({slot.view, {}});
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
      device_slots_({}),
      pinned_slots_({}),
      parameters_(layout.parameters().size()),
      segments_(layout.segments().size()),
      uploads_(layout.chunks().size()),
      updates_(layout.chunks().size()),
      gradient_ops_(layout.chunks().size()),
      impl_(std::make_unique<Impl>()) {
  const MemoryPlan plan = plan_state(layout, spec);
  StatePools pools;
  for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) {
    pools.by_tier[static_cast<std::size_t>(tier)] = machine.make_pool(tier, plan[tier].total());
  }
  store_ = std::make_unique<ChunkStore>(layout, std::move(spec), std::move(pools));
  device_slots_ = SlotRing(store_->device_slots());
  pinned_slots_ = SlotRing(store_->pinned_slots());
  const auto grains = static_cast<std::size_t>(layout.chunk_elements() / kGrainElements);
  impl_->sums.resize(layout.segments().size());
  impl_->cpu_grain_sums.resize(grains);
  impl_->device_grain_sums.resize(grains);
}

Runtime::~Runtime() {
  // Every op holds on to this object. Lanes run in order, so each chunk's newest op of a kind is the last one.
  for (const auto* tickets : {&gradient_ops_, &updates_, &uploads_}) {
    for (const Ticket& ticket : *tickets) wait_quietly(ticket);
  }
  for (const SlotRing* ring : {&device_slots_, &pinned_slots_}) {
    for (const Slot& slot : ring->slots()) wait_quietly(slot.free);
  }
}

Lane& Runtime::lane_of(Tier tier) {
  return on_device(tier) ? machine_.compute() : machine_.cpu();
}

bool Runtime::note_gradient(const Segment& segment) {
  parameters_[static_cast<std::size_t>(segment.parameter)].has_gradient = true;
  SegmentState& state = segments_[static_cast<std::size_t>(index_of(segment))];
  state.counted = false;
  return !std::exchange(state.accumulated, true);
}

// ---- gradients -----------------------------------------------------------------------------------------------------

Ticket Runtime::stage(const Segment& segment, const Gradient& gradient, Slot& slot) {
  const std::int64_t size = size_of(store_->spec().working);
  std::byte* target = slot.view.slice({segment.chunk_offset * size}, {segment.count * size}).data;
  const std::byte* source = gradient.data + segment.parameter_offset * size;
  const auto bytes = static_cast<std::size_t>(segment.count * size);
  return machine_.compute().submit({"stage gradient",
                                    segment.chunk,
                                    OpKind::elementwise,
                                    2.0 * static_cast<double>(bytes),
                                    {slot.free},
                                    [=](StreamRef) { std::memcpy(target, source, bytes); }});
}

Ticket Runtime::copy_down(std::span<const Segment* const> segments, Slot& device, Slot& pinned, Ticket staged) {
  const std::int64_t size = size_of(store_->spec().working);
  const auto bytes = static_cast<double>(elements(segments) * size);
  auto body = [size, from = device.view.data, to = pinned.view.data,
               list = std::vector<const Segment*>(segments.begin(), segments.end())](StreamRef) {
    for (const Segment* segment : list) {
      const std::int64_t offset = segment->chunk_offset * size;
      std::memcpy(to + offset, from + offset, static_cast<std::size_t>(segment->count * size));
    }
  };
  device.free = machine_.download().submit({"gradients down",
                                            segments.front()->chunk,
                                            OpKind::copy,
                                            bytes,
                                            {std::move(staged), pinned.free},
                                            std::move(body)});
  return device.free;
}

Ticket Runtime::accumulate(std::span<const Segment* const> segments, Slot& pinned, Ticket arrived) {
  const std::int64_t chunk = segments.front()->chunk;
  const DType working = store_->spec().working;
  std::vector<AccumulateItem> items;
  for (const Segment* segment : segments) items.push_back({segment, note_gradient(*segment)});
  auto body = [this, working, items = std::move(items), source = pinned.view.data,
               target = store_->gradient(chunk).as<float>()](StreamRef) {
    const kernels::KeepDenormals keep;
    for_slices(machine_.cpu_team(), items,
               [&](const AccumulateItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
                 const kernels::KeepDenormals keep_here;
                 const std::int64_t at = item.segment->chunk_offset + begin;
                 const std::byte* from = source + at * size_of(working);
                 const auto add = item.first ? impl_->kernels.widen : impl_->kernels.accumulate;
                 add(target + at, from, element_of(working), count);
               });
  };
  pinned.free = machine_.cpu().submit({"accumulate",
                                       chunk,
                                       OpKind::elementwise,
                                       static_cast<double>(elements(segments) * (8 + size_of(working))),
                                       {std::move(arrived)},
                                       std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(chunk)] = pinned.free;
}

Ticket Runtime::accumulate(const Segment& segment, const Gradient& gradient) {
  const DType working = store_->spec().working;
  const bool first = note_gradient(segment);
  float* target = store_->gradient(segment.chunk).as<float>() + segment.chunk_offset;
  const std::byte* source = gradient.data + segment.parameter_offset * size_of(working);
  auto body = [this, working, first, target, source, items = std::array{AccumulateItem{&segment, first}}](StreamRef) {
    for_slices(machine_.device_team(), items,
               [&](const AccumulateItem&, std::int64_t begin, std::int64_t count, std::int64_t) {
                 const kernels::KeepDenormals keep;
                 const auto add = first ? impl_->kernels.widen : impl_->kernels.accumulate;
                 add(target + begin, source + begin * size_of(working), element_of(working), count);
               });
  };
  const Ticket done = machine_.compute().submit({"accumulate",
                                                 segment.chunk,
                                                 OpKind::elementwise,
                                                 static_cast<double>(segment.count * (8 + size_of(working))),
                                                 {},
                                                 std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(segment.chunk)] = done;
}

Ticket Runtime::norm(std::span<const Segment* const> segments) {
  const std::int64_t chunk = segments.front()->chunk;
  const bool device = on_device(store_->placement(chunk).gradient);
  std::vector<NormItem> items;
  for (const Segment* segment : segments) {
    segments_[static_cast<std::size_t>(index_of(*segment))].counted = true;
    items.push_back({segment, &impl_->sums[static_cast<std::size_t>(index_of(*segment))]});
  }
  double* grain_sums = device ? impl_->device_grain_sums.data() : impl_->cpu_grain_sums.data();
  ThreadTeam& team = device ? machine_.device_team() : machine_.cpu_team();
  auto body = [this, &team, grain_sums, items = std::move(items),
               values = store_->gradient(chunk).as<const float>()](StreamRef) {
    for_slices(team, items, [&](const NormItem& item, std::int64_t begin, std::int64_t count, std::int64_t grain) {
      const kernels::KeepDenormals keep;
      impl_->kernels.grain_square_sums(grain_sums + grain, values + item.segment->chunk_offset + begin, count);
    });
    const double* next = grain_sums;
    for (const NormItem& item : items) {
      item.sum->clear();
      for (std::int64_t g = 0; g < item.segment->grains(); ++g) item.sum->add(*next++);
    }
  };
  const Ticket done = lane_of(store_->placement(chunk).gradient)
                          .submit({"norm",
                                   chunk,
                                   OpKind::elementwise,
                                   static_cast<double>(elements(segments) * 4),
                                   {gradient_ops_[static_cast<std::size_t>(chunk)]},
                                   std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(chunk)] = done;
}

GradientNorm Runtime::wait_norm() {
  for (std::size_t c = 0; c < layout_.chunks().size(); ++c) {
    std::vector<const Segment*> pending;
    for (const Segment& segment : layout_.chunk_segments(static_cast<std::int64_t>(c))) {
      const SegmentState& state = segments_[static_cast<std::size_t>(index_of(segment))];
      if (state.accumulated && !state.counted) pending.push_back(&segment);
    }
    if (!pending.empty()) static_cast<void>(norm(pending));
  }
  for (const Ticket& ticket : gradient_ops_) ticket.wait();
  kernels::ExactSum total;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].accumulated) total.add(impl_->sums[s]);
  }
  return {total.value(), total.finite()};
}

bool Runtime::has_gradient(std::int64_t parameter) const {
  return parameters_[static_cast<std::size_t>(parameter)].has_gradient;
}

bool Runtime::has_gradient_in_chunk(std::int64_t chunk) const {
  for (const Segment& segment : layout_.chunk_segments(chunk)) {
    if (segments_[static_cast<std::size_t>(index_of(segment))].accumulated) return true;
  }
  return false;
}

void Runtime::wait_discard_gradients() noexcept {
  for (Ticket& ticket : gradient_ops_) wait_quietly(std::exchange(ticket, {}));
  end_update();
}

std::vector<std::string> Runtime::describe_non_finite(std::size_t most) {
  std::vector<std::string> out;
  for (std::size_t p = 0; p < parameters_.size() && out.size() < most; ++p) {
    std::int64_t nan = 0, infinite = 0;
    for (const Segment& segment : layout_.parameter_segments(static_cast<std::int64_t>(p))) {
      if (!segments_[static_cast<std::size_t>(index_of(segment))].accumulated) continue;
      const float* values = store_->gradient(segment.chunk).as<const float>() + segment.chunk_offset;
      for (std::int64_t i = 0; i < segment.count; ++i) {
        nan += std::isnan(values[i]);
        infinite += std::isinf(values[i]);
      }
    }
    if (nan + infinite == 0) continue;
    const ParameterInfo& info = layout_.parameters()[p];
    out.push_back(fmt::format("{} ({} NaN, {} infinite of {})", info.name, nan, infinite, info.numel()));
  }
  return out;
}

// ---- update --------------------------------------------------------------------------------------------------------

void Runtime::begin_update() {
  for (ParameterState& parameter : parameters_) parameter.updates += parameter.has_gradient;
}

Ticket Runtime::update(std::int64_t chunk, StepScale scale) {
  const StateSpec& spec = store_->spec();
  const ChunkPlacement& at = store_->placement(chunk);
  std::vector<UpdateItem> items;
  std::int64_t count = 0;
  for (const Segment& segment : layout_.chunk_segments(chunk)) {
    if (!segments_[static_cast<std::size_t>(index_of(segment))].accumulated) continue;
    const auto parameter = static_cast<std::size_t>(segment.parameter);
    const Hyperparameters& h = hyperparameters_[static_cast<std::size_t>(layout_.parameters()[parameter].group)];
    items.push_back({&segment, kernels::adam_scalars(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay,
                                                     optimizer_ == OptimizerKind::adamw, parameters_[parameter].updates,
                                                     scale.grad_factor)});
    count += segment.count;
  }
  ThreadTeam& team = on_device(at.master) ? machine_.device_team() : machine_.cpu_team();
  auto body = [this, &team, items = std::move(items), p = store_->master(chunk).as<float>(),
               m = store_->optimizer_state(chunk, 0).as<float>(), v = store_->optimizer_state(chunk, 1).as<float>(),
               g = store_->gradient(chunk).as<const float>()](StreamRef) {
    for_slices(team, items, [&](const UpdateItem& item, std::int64_t begin, std::int64_t n, std::int64_t) {
      const kernels::KeepDenormals keep;
      const std::int64_t i = item.segment->chunk_offset + begin;
      impl_->kernels.adam(item.scalars, p + i, m + i, v + i, g + i, kernels::Element::f32, nullptr,
                          kernels::Element::none, n);
    });
  };
  check(spec.working == DType::f32, "working parameters are fp32");
  Ticket& newest = updates_[static_cast<std::size_t>(chunk)];
  newest = lane_of(at.master).submit(
      {"update",
       chunk,
       OpKind::optimizer,
       static_cast<double>(count),
       {gradient_ops_[static_cast<std::size_t>(chunk)], uploads_[static_cast<std::size_t>(chunk)]},
       std::move(body)});
  return newest;
}

Ticket Runtime::copy_up(std::int64_t chunk, Ticket updated) {
  if (on_device(store_->placement(chunk).master)) return updated;
  const View to = store_->working(chunk), from = store_->master(chunk);
  // Compute so far may still read the old values.
  const Ticket read = machine_.compute().mark("before upload", chunk, 0);
  Ticket& newest = uploads_[static_cast<std::size_t>(chunk)];
  newest = machine_.upload().submit(
      {"parameters up",
       chunk,
       OpKind::copy,
       static_cast<double>(to.size.value),
       {std::move(updated), read},
       [to, from](StreamRef) { std::memcpy(to.data, from.data, static_cast<std::size_t>(to.size.value)); }});
  return newest;
}

void Runtime::end_update() {
  for (ParameterState& parameter : parameters_) parameter.has_gradient = false;
  for (SegmentState& segment : segments_) segment = {};
}

// ---- parameters ----------------------------------------------------------------------------------------------------

void Runtime::wait_parameters(std::int64_t chunk) {
  machine_.compute().wait(updates_[static_cast<std::size_t>(chunk)]);
  machine_.compute().wait(uploads_[static_cast<std::size_t>(chunk)]);
}

void Runtime::wait_all() {
  machine_.compute().mark("wait all", -1, 0).wait();
  for (const auto* tickets : {&gradient_ops_, &updates_, &uploads_}) {
    for (const Ticket& ticket : *tickets) ticket.wait();
  }
}

void Runtime::load_masters(std::int64_t parameter) {
  wait_all();
  for (const Segment& segment : layout_.parameter_segments(parameter)) {
    const View working = store_->working(segment.chunk), master = store_->master(segment.chunk);
    if (working.data == master.data) continue;
    const std::int64_t size = size_of(store_->spec().working);
    impl_->kernels.widen(master.as<float>() + segment.chunk_offset, working.data + segment.chunk_offset * size,
                         element_of(store_->spec().working), segment.count);
  }
}

}  // namespace spillway
