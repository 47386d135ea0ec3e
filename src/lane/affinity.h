// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace spillway {

/// More than any host has: numbers of processors are below it.
inline constexpr int kMostProcessors = 1 << 16;

/// Processors that the calling thread may run on, ascending; none where the system does not say.
std::vector<int> allowed_processors();

/// Keeps the calling thread on one processor. False where the system does not let it.
bool stay_on(int processor);

}  // namespace spillway
