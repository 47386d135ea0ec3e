// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "spillway/lane/thread_team.h"
#include "spillway/state/layout.h"

namespace spillway {

/// Calls body(segment, begin, count, first_grain) for pieces that cover all `segments`, shared out over the team and
/// cut at grains: so the number of threads changes no bit. `first_grain` numbers a piece's first grain among all of
/// them. Without a team, whole segments: for devices that share their work out by themselves.
template <class SegmentPointers, class Body>
void for_slices(ThreadTeam* team, const SegmentPointers& segments, const Body& body) {
  std::int64_t grains = 0;
  if (team == nullptr) {
    for (const auto& entry : segments) {
      body(entry, std::int64_t{0}, entry.segment->count, grains);
      grains += entry.segment->grains();
    }
    return;
  }
  for (const auto& entry : segments) grains += entry.segment->grains();
  team->parallel_for(grains, [&](std::int64_t from, std::int64_t to) {
    std::int64_t first = 0;  // grain number at which the present segment starts
    for (const auto& entry : segments) {
      const std::int64_t last = first + entry.segment->grains();
      const std::int64_t begin = std::max(from, first), end = std::min(to, last);
      if (begin < end) {
        const std::int64_t offset = (begin - first) * kGrainElements;
        const std::int64_t count = std::min((end - begin) * kGrainElements, entry.segment->count - offset);
        body(entry, offset, count, begin);
      }
      first = last;
    }
  });
}

}  // namespace spillway
