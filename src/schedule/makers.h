// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/schedule/schedule.h"

namespace spillway {

std::unique_ptr<Schedule> make_resident(Runtime& runtime);
std::unique_ptr<Schedule> make_zero_offload(Runtime& runtime);

}  // namespace spillway
