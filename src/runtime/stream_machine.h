// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "runtime/device_work.h"
#include "spillway/lane/stream_lane.h"
#include "spillway/runtime/machine.h"

namespace spillway {

/// What makes a device with streams out of the general machine: CUDA's parts, or a test's.
struct StreamMachineParts {
  std::shared_ptr<StreamDevice> device;
  StreamRef upload, download;
  StreamRef network = {};  // where there are several ranks
  CurrentStream current;   // of compute, on the thread that asks
  std::unique_ptr<DeviceWork> work;
  std::function<std::unique_ptr<Arena>(Tier tier, Bytes size)> make_arena;
  Bytes capacity;  // of the device; below zero: unlimited
};

std::unique_ptr<Machine> make_stream_machine(const MachineOptions& options, StreamMachineParts parts);

}  // namespace spillway
