// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "benchmarks/offload/measure.h"
#include "spillway/memory/pool.h"
#include "spillway/runtime/machine.h"

namespace spillway::bench {

/// The machine that everything is measured on, `threads` for the CPU optimizer. Throws: InvalidArgument for a device
/// that this build does not have.
std::unique_ptr<Machine> make_machine(const DeviceConfig& device, int threads);

/// What the machine is, for the report.
struct MachineFacts {
  std::string processor;
  int cores = 0;                   // that this process may use
  std::string instruction_set;     // of the CPU kernels
  std::int64_t memory_bytes = -1;  // that this process may still take; below zero: unknown
  double load = -1;                // processes that wanted a core in the last minute; below zero: unknown
};
MachineFacts machine_facts();

enum class Direction { h2d, d2h };
const char* to_string(Direction direction);

/// Copies of one size in one direction, between the device and a host tier, through the machine's lane.
class CopyLoop {
 public:
  /// `machine` must outlive it.
  CopyLoop(Machine& machine, Tier host_tier, Direction direction, Bytes size);
  /// An operation is as many copies as move a few MiB, so that small ones are not measured by the waking of threads.
  Activity activity();
  Bytes bytes_an_operation() const { return size_ * copies_; }

 private:
  void submit();

  const Direction direction_;
  const Bytes size_;
  const std::int64_t copies_;
  Lane& lane_;
  std::unique_ptr<Pool> host_pool_, device_pool_;
  View host_, device_;
  Ticket newest_;
};

/// The optimizer step of `count` parameters on the cpu lane, as Runtime::update does it.
class AdamLoop {
 public:
  /// `machine` must outlive it. `bf16_copy`: a rounded working copy is written in the same pass.
  AdamLoop(Machine& machine, std::int64_t count, bool bf16_copy);
  Activity activity();
  /// Read and written by one operation.
  Bytes bytes_an_operation() const { return {count_ * (bf16_copy_ ? 30 : 28)}; }

 private:
  void update();

  Machine& machine_;
  const std::int64_t count_;
  const bool bf16_copy_;
  std::unique_ptr<Pool> pool_;
  float *p_, *m_, *v_, *g_;
  std::byte* copy_;
};

}  // namespace spillway::bench
