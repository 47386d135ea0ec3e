// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/error.h"
#include "spillway/device/gpu.h"
#include "spillway/runtime/machine.h"

namespace spillway {

std::unique_ptr<Machine> make_cuda_machine(const MachineOptions& options) {
  static_cast<void>(find_gpu(options.device.ordinal));  // throws
  throw InternalError("a GPU was found by a build without CUDA");
}

}  // namespace spillway
