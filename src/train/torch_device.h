// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/device/device.h"
#include "spillway/memory/ledger.h"

// What of LibTorch differs between the emulated device and a GPU. CUDA's side of LibTorch is read in one source.
namespace spillway {

/// Throws: InvalidArgument where a GPU is asked for and this build, this LibTorch or this machine has none.
void check_torch_device(const DeviceConfig& config);

/// Where LibTorch's tensors of the run are: the CPU for the emulated device.
torch::Device torch_device(const DeviceConfig& config);

/// The stream that LibTorch gives work to on the thread that asks. Empty for the emulated device.
std::function<StreamRef()> torch_stream(const DeviceConfig& config);

/// Makes the run's GPU LibTorch's current one on this thread while it lives; nothing on the emulated device.
class TorchDeviceScope {
 public:
  explicit TorchDeviceScope(const DeviceConfig& config);
  ~TorchDeviceScope();
  TorchDeviceScope(const TorchDeviceScope&) = delete;
  TorchDeviceScope& operator=(const TorchDeviceScope&) = delete;

 private:
  int before_ = -1;
};

/// Lets LibTorch's caching allocator take what `ledger` leaves of its capacity, and no more. Nothing on the emulated
/// device, whose ledger counts LibTorch's memory itself.
void cap_torch_memory(const DeviceConfig& config, const MemoryLedger& ledger);

/// Takes the cap off again, and gives what LibTorch's allocator keeps for later back to the GPU.
void lift_torch_cap(const DeviceConfig& config);
void empty_torch_cache(const DeviceConfig& config);

/// The most that LibTorch has held on the GPU since the last reset; zero on the emulated device.
Bytes torch_memory_peak(const DeviceConfig& config);
void reset_torch_memory_peak(const DeviceConfig& config);

/// Moves the buffers of a module.
void move_buffers(const std::vector<torch::Tensor>& buffers, torch::Device device);

}  // namespace spillway
