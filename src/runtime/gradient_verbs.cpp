// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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

void add_gradient(const kernels::CpuKernels& kernels, std::byte* sum, DType sum_type, const std::byte* source,
                  DType source_type, std::int64_t count, bool first) {
  const kernels::KeepDenormals keep;
  if (sum_type == DType::f32) {
    const auto add = first ? kernels.widen : kernels.accumulate;
    add(reinterpret_cast<float*>(sum), source, element_of(source_type), count);
    return;
  }
  const std::int64_t size = size_of(sum_type);
  if (first) {
    std::memcpy(sum, source, static_cast<std::size_t>(count * size));
    return;
  }
  std::array<float, kGrainElements> wide;
  for (std::int64_t i = 0; i < count; i += kGrainElements) {
    const std::int64_t n = std::min(kGrainElements, count - i);
    kernels.widen(wide.data(), sum + i * size, element_of(sum_type), n);
    kernels.accumulate(wide.data(), source + i * size, element_of(source_type), n);
    kernels.narrow(sum + i * size, element_of(sum_type), wide.data(), n);
  }
}

void gradient_square_sums(const kernels::CpuKernels& kernels, double* sums, const std::byte* values, DType type,
                          std::int64_t count) {
  const kernels::KeepDenormals keep;
  if (type == DType::f32) return kernels.grain_square_sums(sums, reinterpret_cast<const float*>(values), count);
  std::array<float, kGrainElements> wide;
  for (std::int64_t i = 0; i < count; i += kGrainElements) {
    const std::int64_t n = std::min(kGrainElements, count - i);
    kernels.widen(wide.data(), values + i * size_of(type), element_of(type), n);
    kernels.grain_square_sums(sums++, wide.data(), n);
  }
}

Ticket Runtime::stage(const Segment& segment, const Gradient& gradient, Slot& slot, Ticket before) {
  const std::int64_t size = size_of(spec_.working);
  std::byte* target = slot.view.slice({segment.chunk_offset * size}, {segment.count * size}).data;
  const std::byte* source = at_element(gradient.data, segment.parameter_offset * size);
  const auto bytes = static_cast<std::size_t>(segment.count * size);
  return machine_.compute().submit({"stage gradient",
                                    segment.chunk,
                                    OpKind::elementwise,
                                    2.0 * static_cast<double>(bytes),
                                    {slot.free, std::move(before)},
                                    [=](StreamRef) { std::memcpy(target, source, bytes); }});
}

Ticket Runtime::copy_down(std::span<const Segment* const> segments, Slot& device, Slot& pinned, Ticket staged) {
  const std::int64_t size = size_of(spec_.working);
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
  const DType working = spec_.working;
  std::vector<AccumulateItem> items;
  for (const Segment* segment : segments) items.push_back({segment, note_gradient(*segment)});
  auto body = [this, working, sum_type = spec_.gradient, items = std::move(items), source = pinned.view.data,
               target = store_->gradient(chunk).data](StreamRef) {
    for_slices(machine_.cpu_team(), items,
               [&](const AccumulateItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
                 const std::int64_t at = item.segment->chunk_offset + begin;
                 add_gradient(impl_->kernels, target + at * size_of(sum_type), sum_type, source + at * size_of(working),
                              working, count, item.first);
               });
  };
  pinned.free = machine_.cpu().submit({"accumulate",
                                       chunk,
                                       OpKind::elementwise,
                                       static_cast<double>(elements(segments) * bytes_of_sum()),
                                       {std::move(arrived), gradient_ops_[static_cast<std::size_t>(chunk)]},
                                       std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(chunk)] = pinned.free;
}

Ticket Runtime::accumulate(const Segment& segment, const Gradient& gradient) {
  const DType working = spec_.working;
  const bool first = note_gradient(segment);
  const DType sum_type = spec_.gradient;
  std::byte* target = at_element(store_->gradient(segment.chunk).data, segment.chunk_offset * size_of(sum_type));
  const std::byte* source = at_element(gradient.data, segment.parameter_offset * size_of(working));
  auto body = [this, working, sum_type, target, source,
               items = std::array{AccumulateItem{&segment, first}}](StreamRef) {
    for_slices(machine_.device_team(), items,
               [&](const AccumulateItem& item, std::int64_t begin, std::int64_t count, std::int64_t) {
                 add_gradient(impl_->kernels, target + begin * size_of(sum_type), sum_type,
                              source + begin * size_of(working), working, count, item.first);
               });
  };
  const Ticket done = machine_.compute().submit({"accumulate",
                                                 segment.chunk,
                                                 OpKind::elementwise,
                                                 static_cast<double>(segment.count * bytes_of_sum()),
                                                 {gradient_ops_[static_cast<std::size_t>(segment.chunk)]},
                                                 std::move(body)});
  return gradient_ops_[static_cast<std::size_t>(segment.chunk)] = done;
}

// Reads the source and the sum, writes the sum.
std::int64_t Runtime::bytes_of_sum() const {
  return size_of(spec_.working) + 2 * size_of(spec_.gradient);
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
  auto body = [this, &team, grain_sums, items = std::move(items), type = spec_.gradient,
               values = store_->gradient(chunk).data](StreamRef) {
    for_slices(team, items, [&](const NormItem& item, std::int64_t begin, std::int64_t count, std::int64_t grain) {
      gradient_square_sums(impl_->kernels, grain_sums + grain,
                           values + (item.segment->chunk_offset + begin) * size_of(type), type, count);
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
                                   static_cast<double>(elements(segments) * size_of(spec_.gradient)),
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
  for (const Ticket& ticket : gradient_ops_) machine_.wait(ticket);
  return machine_.oracle().gradient_norm([this]() -> GradientNorm {
    kernels::ExactSum total;
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      if (segments_[s].accumulated) total.add(impl_->sums[s]);
    }
    return {total.value(), total.finite()};
  });
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
