// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/runtime_impl.h"

namespace spillway {
namespace {

/// A segment and what its part of an op needs, fixed when the op is submitted.
struct AccumulateItem {
  const Segment* segment;
  bool first;  // of this step: replaces what is there
};
struct NormItem {
  const Segment* segment;
  kernels::ExactSum* sum;
};

}  // namespace

Ticket Runtime::stage(const Segment& segment, const Gradient& gradient, Slot& slot, Ticket before) {
  const std::int64_t size = size_of(store_->spec().working);
  std::byte* target = slot.view.slice({segment.chunk_offset * size}, {segment.count * size}).data;
  const std::byte* source = gradient.data + segment.parameter_offset * size;
  const auto bytes = static_cast<std::size_t>(segment.count * size);
  return machine_.compute().submit({"stage gradient",
                                    segment.chunk,
                                    OpKind::elementwise,
                                    2.0 * static_cast<double>(bytes),
                                    {slot.free, std::move(before)},
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
    for_slices(machine_.cpu_team(), items,
               [&](const AccumulateItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
                 const kernels::KeepDenormals keep;
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
                                       {std::move(arrived), gradient_ops_[static_cast<std::size_t>(chunk)]},
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
                                                 {gradient_ops_[static_cast<std::size_t>(segment.chunk)]},
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

}  // namespace spillway
