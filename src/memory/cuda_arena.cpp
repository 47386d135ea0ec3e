// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_arena.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "device/cuda_api.h"
#include "memory/host_region.h"
#include "spillway/core/error.h"

namespace spillway::cuda {
namespace {

class DeviceArena final : public Arena {
 public:
  DeviceArena(int ordinal, Bytes size) {
    if (size.value == 0) return;
    const DeviceGuard guard(ordinal);
    // CUDA promises 256 bytes of alignment.
    const Bytes room = size + Pool::kAlignment;
    const cudaError_t code = cudaMalloc(&memory_, static_cast<std::size_t>(room.value));
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // else the next call would report it again
      const Bytes free = describe_gpu(ordinal).free;
      throw OutOfMemory(fmt::format("GPU {} has no {} in one piece left: {} are free, other programs included", ordinal,
                                    to_string(size), to_string(free)),
                        size.value, size > free ? (size - free).value : 0);
    }
    check_code(code, "taking memory of the GPU");
    const auto address = reinterpret_cast<std::uintptr_t>(memory_);
    const auto alignment = static_cast<std::uintptr_t>(Pool::kAlignment.value);
    base_ = static_cast<std::byte*>(memory_) + (alignment - address % alignment) % alignment;
  }
  ~DeviceArena() override {
    if (cudaFree(memory_) != cudaSuccess) cudaGetLastError();  // else the next launch would report it
  }
  std::byte* base() const override { return base_; }

 private:
  void* memory_ = nullptr;
  std::byte* base_ = nullptr;
};

class PinnedArena final : public Arena {
 public:
  PinnedArena(int ordinal, Bytes size) : region_(size, describe_gpu(ordinal).numa_node) {
    if (size.value == 0) return;
    const DeviceGuard guard(ordinal);
    const cudaError_t code = cudaHostRegister(region_.base(), region_.size(), cudaHostRegisterPortable);
    if (code != cudaSuccess) {
      cudaGetLastError();
      throw OutOfMemory(
          fmt::format("the system does not let {} of host memory be page-locked: {}. Look at the limit of "
                      "locked memory (ulimit -l) and of the container",
                      to_string(size), cudaGetErrorString(code)),
          size.value, size.value);
    }
    locked_.base = region_.base();
    check_locked(region_.base());
    check_locked(region_.base() + region_.size() - 1);
  }
  std::byte* base() const override { return region_.base(); }

 private:
  // Copies from memory that is not locked would be slow and would not overlap, without a word.
  static void check_locked(const void* address) {
    cudaPointerAttributes attributes{};
    check_code(cudaPointerGetAttributes(&attributes, address), "looking at page-locked memory");
    if (attributes.type != cudaMemoryTypeHost) throw DeviceError("CUDA does not take locked memory for page-locked");
  }

  struct Registration {
    ~Registration() {
      if (base != nullptr && cudaHostUnregister(base) != cudaSuccess) cudaGetLastError();
    }
    void* base = nullptr;
  };

  HostRegion region_;
  Registration locked_;  // ends before the pages do
};

}  // namespace

std::unique_ptr<Arena> make_device_arena(int ordinal, Bytes size) {
  return std::make_unique<DeviceArena>(ordinal, size);
}

std::unique_ptr<Arena> make_pinned_arena(int ordinal, Bytes size) {
  return std::make_unique<PinnedArena>(ordinal, size);
}

}  // namespace spillway::cuda
