// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/device/event.h"
#include "spillway/device/gpu.h"

// What the library asks of CUDA, without CUDA's headers. A build without CUDA has the same functions, which say so.
namespace spillway::cuda {

/// What why_no_gpu() has found usable.
GpuInfo describe_gpu(int ordinal);

/// A GPU's streams and events. Owns: its streams, which it ends when it is destroyed, once they have nothing left.
class CudaDevice : public StreamDevice {
 public:
  /// A stream that neither waits for the framework's default stream nor makes it wait. Owned by the device.
  virtual StreamRef make_stream() = 0;
};
/// Throws: InvalidArgument as find_gpu.
std::shared_ptr<CudaDevice> make_cuda_device(int ordinal);

/// Makes a GPU the calling thread's while it lives; then the one before is put back, which is another's affair. One
/// that this process has not used is not: since CUDA 12 that alone takes memory there, of every rank on GPU 0.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  [[maybe_unused]] int ordinal_ = 0, before_ = 0;  // builds without CUDA have nothing to put back
};

/// CUDA's default stream by its other name, which is not null: what StreamRef calls a framework's null stream.
StreamRef named_stream(void* native);

void copy(StreamRef stream, void* to, const void* from, Bytes bytes);
void zero(StreamRef stream, void* to, Bytes bytes);

/// Throws: DeviceError with CUDA's words for an error code other than 0. `what` was tried.
void check_code(int code, const char* what);

}  // namespace spillway::cuda
