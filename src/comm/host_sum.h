// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "spillway/core/dtype.h"

namespace spillway {

/// Each of `targets` [count] receives the sum of all `sources` [count], added in their order in fp32 and rounded once
/// to `type` (i64: exactly). Targets may be sources.
void sum_values(std::span<void* const> targets, std::span<const void* const> sources, DType type, std::int64_t count);

}  // namespace spillway
