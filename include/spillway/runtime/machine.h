// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "spillway/comm/communicator.h"
#include "spillway/core/config.h"
#include "spillway/core/trace.h"
#include "spillway/lane/lane.h"
#include "spillway/lane/thread_team.h"
#include "spillway/memory/ledger.h"
#include "spillway/memory/pool.h"
#include "spillway/runtime/oracle.h"

namespace spillway {

/// What a machine is made from.
struct MachineOptions {
  DeviceConfig device;
  std::optional<Bytes> host_memory;  // the most that the pinned tier may take
  int threads = 1;                   // of the CPU optimizer
  std::vector<int> cores = {};       // processors that its threads stay on, as many (cores.h); none: they run anywhere
  std::string instruction_set = {};  // of the CPU kernels; none named: the fastest that this processor runs
  std::int64_t trace_events = 0;     // kept for a timeline; 0: totals only
  OpDelay delay;                     // called around every op, for tests of races; may be empty
  Communicator* communicator = nullptr;  // must outlive the machine; none: one rank
  /// CUDA only: the stream that the framework's work of the calling thread goes to; its null stream is meant by an
  /// empty reference. Not given: a stream of the machine's own.
  std::function<StreamRef()> current_stream = {};
};

class DeviceWork;

/// The one thing that knows what is real: it makes pools and lanes.
/// Owns: its lanes, ledgers and trace. Threads: one at a time, but for what its parts say.
class Machine {
 public:
  virtual ~Machine() = default;

  virtual DeviceKind kind() const = 0;
  virtual ComputeLane& compute() = 0;
  virtual Lane& upload() = 0;    // host to device
  virtual Lane& download() = 0;  // device to host
  virtual Lane& cpu() = 0;       // the CPU optimizer
  /// What ranks tell each other of gradients and parameters. Throws: InternalError where there is one rank.
  virtual Lane& network() = 0;
  /// Of the machine's options; null where there is one rank, and in planning.
  virtual Communicator* communicator() { return nullptr; }
  /// The team of the cpu lane: used inside its ops only.
  virtual ThreadTeam& cpu_team() = 0;
  /// The team that does the work of device kernels on the emulated device: used inside compute ops only.
  virtual ThreadTeam& device_team() = 0;
  /// What bodies of compute ops, and of copies, do their work with. Here: the processor's kernels, on host addresses.
  virtual const DeviceWork& device_work() const;
  /// The same for work on host memory.
  virtual const DeviceWork& host_work() const;
  /// Whether device memory has addresses that the host reads and writes.
  virtual bool host_reads_device() const { return true; }

  /// Shared, since memory that a framework keeps may outlive the machine.
  virtual std::shared_ptr<MemoryLedger> ledger(Tier tier) = 0;
  virtual std::unique_ptr<Pool> make_pool(Tier tier, Bytes size) = 0;
  virtual Trace& trace() = 0;

  /// Answers the questions that decisions depend on.
  virtual Oracle& oracle() { return memory_; }
  /// How the host waits for an op. Blocks: until it has run. Throws: its error.
  virtual void wait(const Ticket& ticket) { ticket.wait(); }

 private:
  Oracle memory_;
};

/// A device imitated in ordinary memory: capacity enforced, copies asynchronous and full duplex, asleep for the link's
/// time. Throws: InvalidArgument for impossible options.
std::unique_ptr<Machine> make_emulated_machine(MachineOptions options);

/// GPU number DeviceConfig::ordinal, with streams of its own for each direction.
/// Throws: InvalidArgument in a build without CUDA, or where there is no usable GPU, with what was found.
std::unique_ptr<Machine> make_cuda_machine(const MachineOptions& options);

/// The one that `options.device` names. Throws: as that one.
std::unique_ptr<Machine> make_machine(MachineOptions options);

/// Cores this process may use: its affinity, and a container's CPU limit. At least one.
int available_cores();

/// Host memory this process may still take: what the system has left, and what the limits of its control groups leave,
/// where cached files count as free. Reads below `root` (tests give one of their own). Empty where the system does not
/// say.
std::optional<Bytes> available_host_memory(const std::filesystem::path& root = "/");

}  // namespace spillway
