// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/memory/pool.h"

// Arenas of a GPU. In builds with CUDA alone.
namespace spillway::cuda {

/// Memory of GPU `ordinal`, taken once. Throws: OutOfMemory with what the GPU has left.
std::unique_ptr<Arena> make_device_arena(int ordinal, Bytes size);

/// Page-locked host memory on the NUMA node of GPU `ordinal`, exactly as large as asked.
/// Throws: OutOfMemory where the system has no such memory or does not let it be locked; DeviceError where CUDA does
/// not take it for page-locked afterwards.
std::unique_ptr<Arena> make_pinned_arena(int ordinal, Bytes size);

}  // namespace spillway::cuda
