// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/exact_sum.h"
#include "kernels/scalars.h"
#include "runtime/device_work.h"
#include "runtime/slices.h"
#include "spillway/core/error.h"
#include "spillway/runtime/runtime.h"

namespace spillway {

/// The kernels' name of a working type. Throws: InvalidArgument for others than fp32, bf16, fp16.
inline kernels::Element element_of(DType type) {
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

/// Their elements together.
inline std::int64_t elements(std::span<const Segment* const> segments) {
  std::int64_t count = 0;
  for (const Segment* segment : segments) count += segment->count;
  return count;
}

// `base + count` elements; null stays null, since a virtual machine's views hold nothing.
template <class T>
T* at_element(T* base, std::int64_t count) {
  return base == nullptr ? nullptr : base + count;
}

// For ops whose error was or will be reported by the call that needs them. Returns whether the op went well.
inline bool wait_quietly(Machine& machine, const Ticket& ticket) noexcept {
  try {
    machine.wait(ticket);
    return true;
  } catch (...) {
    return false;
  }
}

/// Who does the work on a tier's bytes, and the team that it is shared out over; none where the device does that.
struct Workplace {
  ThreadTeam* team;
  const DeviceWork& work;
};

inline Workplace workplace(Machine& machine, Tier tier) {
  if (tier != Tier::device) return {&machine.cpu_team(), machine.host_work()};
  return {machine.host_reads_device() ? &machine.device_team() : nullptr, machine.device_work()};
}

/// sum += source, or sum = source where `first`; the sum in fp32 or in 16 bits.
void add_gradient(const DeviceWork& work, StreamRef stream, std::byte* sum, DType sum_type, const std::byte* source,
                  DType type, std::int64_t count, bool first);

/// What each rank owns of a chunk, in elements of `size` bytes.
std::vector<Bytes> shard_bytes(const Layout& layout, std::int64_t chunk, std::int64_t size);

/// The sum of all ranks' sums: of their limbs, so that no order matters. Blocks: until all ranks have called.
kernels::ExactSum sum_of_ranks(Machine& machine, const kernels::ExactSum& mine);

/// A segment and where the square sum of its gradient goes.
struct Runtime::NormItem {
  const Segment* segment;
  kernels::ExactSum* sum;
};

struct Runtime::Impl {
  std::vector<kernels::ExactSum> sums;                    // one a segment: the square sum of its accumulated gradient
  std::vector<double> cpu_grain_sums, device_grain_sums;  // of one op: room for a chunk's grains
};

}  // namespace spillway
