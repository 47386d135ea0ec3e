// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace spillway::test {

/// How often this program called operator new so far, on any thread.
std::int64_t allocation_count();

}  // namespace spillway::test
