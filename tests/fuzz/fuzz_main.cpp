// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "fuzz/targets.h"

// libFuzzer's entry; the build names the target.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  spillway::fuzz::SPILLWAY_FUZZ_TARGET({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
