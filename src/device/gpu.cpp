// SPDX-License-Identifier: Apache-2.0
#include "spillway/device/gpu.h"

#include <fmt/format.h>

#include <cstring>

#include "device/cuda_api.h"
#include "spillway/core/error.h"

namespace spillway {

GpuInfo find_gpu(int ordinal) {
  const std::string reason = why_no_gpu(ordinal);
  require(reason.empty(), fmt::format("device cuda was asked for, but there is no usable GPU {}: {}. Use the emulated "
                                      "device (device.kind \"emulated\"), which needs no GPU",
                                      ordinal, reason));
  return cuda::describe_gpu(ordinal);
}

void copy_async(StreamRef stream, void* to, const void* from, Bytes bytes) {
  if (bytes.value == 0) return;
  if (stream == StreamRef()) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes.value));
  } else {
    cuda::copy(stream, to, from, bytes);
  }
}

}  // namespace spillway
