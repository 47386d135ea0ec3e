// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "spillway/core/config.h"

namespace spillway {

/// The factor on the learning rate of update number `update`, counted from 0 over updates that took place: a skipped
/// step does not advance it. See LrScheduleConfig.
double lr_factor(const LrScheduleConfig& schedule, std::int64_t update);

}  // namespace spillway
