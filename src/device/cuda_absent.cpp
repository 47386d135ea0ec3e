// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_api.h"
#include "spillway/core/error.h"

namespace spillway {

std::string why_no_gpu(int) {
  return "this build has no CUDA (the toolkit was not found, or left out, when it was configured)";
}

namespace cuda {
namespace {

[[noreturn]] void refuse() {
  throw InternalError("a build without CUDA was asked for something of CUDA");
}

}  // namespace

DeviceGuard::DeviceGuard(int) {
  refuse();
}

DeviceGuard::~DeviceGuard() = default;

GpuInfo describe_gpu(int) {
  refuse();
}

std::shared_ptr<CudaDevice> make_cuda_device(int ordinal) {
  static_cast<void>(find_gpu(ordinal));  // throws
  refuse();
}

StreamRef named_stream(void*) {
  refuse();
}

void copy(StreamRef, void*, const void*, Bytes) {
  refuse();
}

void check_code(int, const char*) {
  refuse();
}

}  // namespace cuda
}  // namespace spillway
