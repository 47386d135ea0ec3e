// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace spillway::test {

/// How often this program called operator new so far, on any thread.
std::int64_t allocation_count();

/// How often it locked a mutex, and whether that is counted: not under the sanitizers, which do so by themselves.
std::int64_t lock_count();
bool locks_are_counted();

}  // namespace spillway::test
