// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "runtime/runtime_impl.h"

namespace spillway {
namespace {

/// A segment and what its part of an op needs, fixed when the op is submitted.
struct AccumulateItem {
  const Segment* segment;
  bool first;  // of this step: replaces what is there
};

void add_grains(kernels::ExactSum& sum, const double* grains, std::int64_t count) {
  sum.clear();
  for (std::int64_t i = 0; i < count; ++i) sum.add(grains[i]);
}

}  // namespace

void add_gradient(const DeviceWork& work, StreamRef stream, std::byte* sum, DType sum_type, const std::byte* source,
                  DType type, std::int64_t count, bool first) {
  if (!first) return work.accumulate(stream, sum, element_of(sum_type), source, element_of(type), count);
  if (sum_type == type) return work.copy(stream, sum, source, {count * size_of(type)});
  if (type == DType::f32)
    return work.narrow(stream, sum, element_of(sum_type), reinterpret_cast<const float*>(source), count);
  work.widen(stream, reinterpret_cast<float*>(sum), source, element_of(type), count);
}

Ticket Runtime::stage(const Segment& segment, const Gradient& gradient, Slot& slot, Ticket before) {
  parameters_[static_cast<std::size_t>(segment.parameter)].has_gradient = true;
  const std::int64_t size = size_of(spec_.working);
  std::byte* target = slot.view.slice({segment.chunk_offset * size}, {segment.count * size}).data;
  const std::byte* source = at_element(gradient.data, segment.parameter_offset * size);
  const Bytes bytes{segment.count * size};
  return machine_.compute().submit(
      {"stage gradient",
       segment.chunk,
       OpKind::elementwise,
       2.0 * static_cast<double>(bytes.value),
       {slot.free, std::move(before)},
       [=, &work = machine_.device_work()](StreamRef stream) { work.copy(stream, target, source, bytes); }});
}

Ticket Runtime::copy_down(std::span<const Segment* const> segments, Slot& device, Slot& pinned, Ticket staged,
                          Sums sums) {
  const std::int64_t size = size_of(arriving_type(sums));
  const auto bytes = static_cast<double>(elements(segments) * size);
  auto body = [&work = machine_.device_work(), size, from = device.view.data, to = pinned.view.data,
               list = std::vector<const Segment*>(segments.begin(), segments.end())](StreamRef stream) {
    for (const Segment* segment : list) {
      const std::int64_t offset = segment->chunk_offset * size;
      work.copy(stream, to + offset, from + offset, {segment->count * size});
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

Ticket Runtime::accumulate(std::span<const Segment* const> segments, Slot& pinned, Ticket arrived, Sums sums) {
  const std::int64_t chunk = segments.front()->chunk;
  const DType working = arriving_type(sums);
  std::vector<AccumulateItem> items;
  for (const Segment* segment : segments) items.push_back({segment, note_gradient(*segment, sums)});
  auto body = [place = workplace(machine_, Tier::pinned), working, sum_type = spec_.gradient, items = std::move(items),
               source = pinned.view.data, target = sums_of(chunk, sums).data](StreamRef stream) {
    for_slices(place.team, items,
               [&](const AccumulateItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
                 const std::int64_t at = item.segment->chunk_offset + begin;
                 add_gradient(place.work, stream, target + at * size_of(sum_type), sum_type,
                              source + at * size_of(working), working, count, item.first);
               });
  };
  pinned.free = machine_.cpu().submit({"accumulate",
                                       chunk,
                                       OpKind::elementwise,
                                       static_cast<double>(elements(segments) * bytes_of_sum(sums)),
                                       {std::move(arrived), gradient_ops_[static_cast<std::size_t>(chunk)]},
                                       std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(chunk)] = pinned.free;
}

Ticket Runtime::accumulate(const Segment& segment, const Gradient& gradient, Sums sums) {
  const DType working = spec_.working;
  const bool first = note_gradient(segment, sums);
  const DType sum_type = spec_.gradient;
  std::byte* target = at_element(sums_of(segment.chunk, sums).data, segment.chunk_offset * size_of(sum_type));
  const std::byte* source = at_element(gradient.data, segment.parameter_offset * size_of(working));
  auto body = [place = workplace(machine_, Tier::device), working, sum_type, target, source,
               items = std::array{AccumulateItem{&segment, first}}](StreamRef stream) {
    for_slices(place.team, items,
               [&](const AccumulateItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
                 add_gradient(place.work, stream, target + begin * size_of(sum_type), sum_type,
                              source + begin * size_of(working), working, count, item.first);
               });
  };
  const Ticket done = machine_.compute().submit({"accumulate",
                                                 segment.chunk,
                                                 OpKind::elementwise,
                                                 static_cast<double>(segment.count * bytes_of_sum(sums)),
                                                 {gradient_ops_[static_cast<std::size_t>(segment.chunk)]},
                                                 std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(segment.chunk)] = done;
}

// Reads the source and the sum, writes the sum.
std::int64_t Runtime::bytes_of_sum(Sums sums) const {
  return size_of(arriving_type(sums)) + 2 * size_of(spec_.gradient);
}

// The sums stay on the device, each grain's at its own place, until wait_norm() fetches all of them.
Runtime::OpBody Runtime::norm_on_device(std::int64_t chunk, std::vector<NormItem> items) {
  const std::int64_t before = layout_.chunks()[static_cast<std::size_t>(chunk)].begin + kept_begin(chunk);
  return [place = workplace(machine_, Tier::device), items = std::move(items), before, type = spec_.gradient,
          sums = store_->device_sums().as<double>(), values = store_->gradient(chunk).data](StreamRef stream) {
    for_slices(place.team, items, [&](const NormItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
      const std::int64_t at = item.segment->chunk_offset + begin;
      place.work.grain_square_sums(stream, sums + (before + at) / kGrainElements, values + at * size_of(type),
                                   element_of(type), count);
    });
  };
}

Runtime::OpBody Runtime::norm_on_host(std::int64_t chunk, bool device, std::vector<NormItem> items) {
  double* grain_sums = device ? impl_->device_grain_sums.data() : impl_->cpu_grain_sums.data();
  return [place = workplace(machine_, device ? Tier::device : Tier::pinned), grain_sums, items = std::move(items),
          type = spec_.gradient, values = store_->gradient(chunk).data](StreamRef stream) {
    for_slices(place.team, items,
               [&](const NormItem& item, std::int64_t begin, std::int64_t count, std::int64_t grain) {
                 const std::int64_t at = item.segment->chunk_offset + begin;
                 place.work.grain_square_sums(stream, grain_sums + grain, values + at * size_of(type), element_of(type),
                                              count);
               });
    const double* next = grain_sums;
    for (const NormItem& item : items) {
      add_grains(*item.sum, next, item.segment->grains());
      next += item.segment->grains();
    }
  };
}

Ticket Runtime::norm(std::span<const Segment* const> segments) {
  const std::int64_t chunk = segments.front()->chunk;
  const bool device = on_device(store_->placement(chunk).gradient);
  std::vector<NormItem> items;
  for (const Segment* segment : segments) {
    segments_[static_cast<std::size_t>(index_of(*segment))].counted = true;
    items.push_back({segment, &impl_->sums[static_cast<std::size_t>(index_of(*segment))]});
  }
  auto body = device && !machine_.host_reads_device() ? norm_on_device(chunk, std::move(items))
                                                      : norm_on_host(chunk, device, std::move(items));
  const Ticket done = lane_of(store_->placement(chunk).gradient)
                          .submit({"norm",
                                   chunk,
                                   OpKind::elementwise,
                                   static_cast<double>(elements(segments) * size_of(spec_.gradient)),
                                   {gradient_ops_[static_cast<std::size_t>(chunk)]},
                                   std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(chunk)] = done;
}

void Runtime::wait_device_sums() {
  const View& from = store_->device_sums();
  if (machine_.host_reads_device() || from.size.value == 0) return;
  auto* sums = store_->host_sums().as<double>();
  machine_.wait(
      machine_.compute().submit({"norm down", -1, OpKind::copy, static_cast<double>(from.size.value), gradient_ops_,
                                 [&work = machine_.device_work(), from, sums](StreamRef stream) {
                                   work.copy(stream, sums, from.data, from.size);
                                 }}));
  for (const Segment& segment : layout_.kept_segments()) {
    const auto s = static_cast<std::size_t>(index_of(segment));
    if (!segments_[s].accumulated || !on_device(store_->placement(segment.chunk).gradient)) continue;
    const std::int64_t begin = layout_.chunks()[static_cast<std::size_t>(segment.chunk)].begin +
                               kept_begin(segment.chunk) + segment.chunk_offset;
    add_grains(impl_->sums[s], sums + begin / kGrainElements, segment.grains());
  }
}

GradientNorm Runtime::wait_norm() {
  for (std::size_t c = 0; c < layout_.chunks().size(); ++c) {
    std::vector<const Segment*> pending;
    for (const Segment& segment : layout_.kept_segments_of_chunk(static_cast<std::int64_t>(c))) {
      const SegmentState& state = segments_[static_cast<std::size_t>(index_of(segment))];
      if (state.accumulated && !state.counted) pending.push_back(&segment);
    }
    if (!pending.empty()) static_cast<void>(norm(pending));
  }
  for (const Ticket& ticket : gradient_ops_) machine_.wait(ticket);
  wait_device_sums();
  return machine_.oracle().gradient_norm([this]() -> GradientNorm {
    kernels::ExactSum total;
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      if (segments_[s].accumulated) total.add(impl_->sums[s]);
    }
    if (layout_.partition().cuts()) total = sum_of_ranks(machine_, total);
    return {total.value(), total.finite()};
  });
}

bool Runtime::has_gradient(std::int64_t parameter) const {
  return parameters_[static_cast<std::size_t>(parameter)].has_gradient;
}

bool Runtime::has_gradient_in_chunk(std::int64_t chunk) const {
  for (const Segment& segment : layout_.chunk_segments(chunk)) {
    if (has_gradient(segment.parameter)) return true;
  }
  return false;
}

void Runtime::wait_discard_gradients() noexcept {
  for (Ticket& ticket : gradient_ops_) wait_quietly(machine_, std::exchange(ticket, {}));
  end_update();
}

std::vector<std::string> Runtime::describe_non_finite(std::size_t most) {
  if (store_->working().data == nullptr) return {};  // a virtual machine's
  std::vector<std::string> out;
  std::vector<float> values;
  for (std::size_t p = 0; p < parameters_.size() && out.size() < most; ++p) {
    if (!parameters_[p].has_gradient) continue;
    const ParameterInfo& info = layout_.parameters()[p];
    values.assign(static_cast<std::size_t>(info.numel()), 0.0F);
    read({StateRole::Kind::gradient}, static_cast<std::int64_t>(p), values.data());
    const auto nan = std::count_if(values.begin(), values.end(), [](float x) { return std::isnan(x); });
    const auto infinite = std::count_if(values.begin(), values.end(), [](float x) { return std::isinf(x); });
    if (nan + infinite == 0) continue;
    out.push_back(fmt::format("{} ({} NaN, {} infinite of {})", info.name, nan, infinite, info.numel()));
  }
  return out;
}

}  // namespace spillway
