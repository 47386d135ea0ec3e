// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "spillway/schedule/schedule.h"

namespace spillway {

/// One schedule: its name in configurations, what it needs, and how it is made.
struct ScheduleEntry {
  std::string_view name;
  std::string_view summary;
  ChunkPlacement placement;  // of every chunk
  bool stages = false;       // uses staging slots on both sides
  std::unique_ptr<Schedule> (*make)(Runtime& runtime);
};

/// All schedules, the reference first.
std::span<const ScheduleEntry> schedules();

/// Throws: InvalidArgument naming all schedules there are.
const ScheduleEntry& find_schedule(std::string_view name);

}  // namespace spillway
