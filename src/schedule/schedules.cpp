// SPDX-License-Identifier: Apache-2.0
#include "spillway/schedule/schedules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "core/printable.h"
#include "schedule/makers.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr std::array<ScheduleEntry, 2> kSchedules{{
    {"resident", "everything stays on the device: the reference", ChunkPlacement::all(Tier::device), false,
     make_resident},
    {"zero_offload", "gradients, masters, optimizer states and the update on the host (ZeRO-Offload)",
     ChunkPlacement::all(Tier::pinned), true, make_zero_offload},
}};

}  // namespace

StepDecision decide(const GradientNorm& norm, const StepRequest& request) {
  StepDecision decision;
  decision.grad_norm = std::sqrt(norm.squared) * request.grad_scale;
  decision.finite = norm.finite && std::isfinite(decision.grad_norm);
  const double clip = request.clip_norm > 0 ? std::min(1.0, request.clip_norm / (decision.grad_norm + 1e-6)) : 1.0;
  decision.scale.grad_factor = static_cast<float>(request.grad_scale * clip);
  return decision;
}

std::span<const ScheduleEntry> schedules() {
  return kSchedules;
}

const ScheduleEntry& find_schedule(std::string_view name) {
  std::string known;
  for (const ScheduleEntry& entry : kSchedules) {
    if (entry.name == name) return entry;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(fmt::format("there is no schedule \"{}\"; there are: {}", printable(std::string(name)), known));
}

}  // namespace spillway
