// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "spillway/core/units.h"
#include "spillway/device/device.h"

namespace spillway {

/// A GPU as it is found when asked.
struct GpuInfo {
  std::string name;
  int compute_capability = 0;  // without the point: 90 is 9.0
  Bytes memory, free;
  int numa_node = -1;  // that the GPU hangs on; below zero: unknown
};

/// Why GPU number `ordinal` cannot be used: a build without CUDA, no driver, no such GPU, one too old. Empty where it
/// can. Never throws for what it finds.
std::string why_no_gpu(int ordinal);

/// Throws: InvalidArgument with why_no_gpu's reason and what to use instead.
GpuInfo find_gpu(int ordinal);

/// Copies between host and device memory, or inside one of them. With a stream: in its order, where host memory that is
/// not page-locked may make it Blocks: until the copy is done. With an empty stream: at once, between host addresses.
/// Throws: DeviceError.
void copy_async(StreamRef stream, void* to, const void* from, Bytes bytes);

}  // namespace spillway
