// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "runtime/device_work.h"
#include "runtime/network_context.h"
#include "spillway/core/error.h"
#include "spillway/runtime/cores.h"
#include "spillway/runtime/machine.h"

namespace spillway {
namespace {

void check_device(const DeviceConfig& device) {
  require(device.kind == DeviceConfig::Kind::emulated, "the emulated machine was asked for another device");
  if (device.memory) {
    require(device.memory->value > 0,
            fmt::format("device memory of {} bytes was asked for; expected more than zero", device.memory->value));
  }
  for (double rate : {device.upload_bandwidth, device.download_bandwidth, device.latency.value, device.compute_rate}) {
    require(std::isfinite(rate) && rate >= 0,
            "bandwidths, latency and compute rate of the device must be finite and not negative");
  }
}

class EmulatedMachine final : public Machine {
 public:
  explicit EmulatedMachine(const MachineOptions& options)
      : trace_({true, options.trace_events, 0}),
        ledgers_{std::make_shared<MemoryLedger>(Tier::device, options.device.memory.value_or(Bytes{-1})),
                 std::make_shared<MemoryLedger>(Tier::pinned, options.host_memory.value_or(Bytes{-1})),
                 std::make_shared<MemoryLedger>(Tier::host, Bytes{-1})},
        host_work_(cpu_work(options.instruction_set)),
        cpu_team_(options.threads, options.cores),
        device_team_(options.threads),
        communicator_(options.communicator),
        compute_(make_inline_compute_lane(options.device.compute_rate, context(options))),
        network_(options.communicator == nullptr
                     ? nullptr
                     : make_thread_lane("network", {}, network_context(context(options), *options.communicator))),
        download_(
            make_thread_lane("d2h", {options.device.download_bandwidth, options.device.latency}, context(options))),
        cpu_(make_thread_lane("cpu", {}, context(options))),
        upload_(make_thread_lane("h2d", {options.device.upload_bandwidth, options.device.latency}, context(options))) {}

  DeviceKind kind() const override { return DeviceKind::emulated; }
  ComputeLane& compute() override { return *compute_; }
  Lane& upload() override { return *upload_; }
  Lane& download() override { return *download_; }
  Lane& cpu() override { return *cpu_; }
  Lane& network() override {
    check(network_ != nullptr, "only several ranks have a network");
    return *network_;
  }
  Communicator* communicator() override { return communicator_; }
  ThreadTeam& cpu_team() override { return cpu_team_; }
  const DeviceWork& host_work() const override { return host_work_; }
  const DeviceWork& device_work() const override { return host_work_; }
  ThreadTeam& device_team() override { return device_team_; }
  Trace& trace() override { return trace_; }

  std::shared_ptr<MemoryLedger> ledger(Tier tier) override {
    require(tier != Tier::file, "the emulated machine has no file tier");
    return ledgers_[static_cast<std::size_t>(tier)];
  }
  std::unique_ptr<Pool> make_pool(Tier tier, Bytes size) override {
    return std::make_unique<Pool>(*ledger(tier), make_host_arena(size), size);
  }

 private:
  LaneContext context(const MachineOptions& options) { return {&trace_, options.delay}; }

  Trace trace_;
  std::array<std::shared_ptr<MemoryLedger>, 3> ledgers_;
  const DeviceWork& host_work_;
  ThreadTeam cpu_team_, device_team_;
  Communicator* const communicator_;
  std::unique_ptr<ComputeLane> compute_;
  // Destroyed in reverse order, each running what it was given: an upload may wait for the cpu lane, that for a
  // download, so those that wait go first. The network stands on both sides of them; a runtime leaves nothing in it.
  std::unique_ptr<Lane> network_, download_, cpu_, upload_;
};

}  // namespace

std::unique_ptr<Machine> make_emulated_machine(MachineOptions options) {
  check_device(options.device);
  require(options.threads >= 1,
          fmt::format("{} optimizer threads were asked for; expected at least 1", options.threads));
  return std::make_unique<EmulatedMachine>(options);
}

std::unique_ptr<Machine> make_machine(MachineOptions options) {
  if (options.device.kind == DeviceConfig::Kind::cuda) return make_cuda_machine(options);
  return make_emulated_machine(std::move(options));
}

int available_cores() {
  const HostCores host = read_host_cores();
  const int cores = std::max(1, host.processors);
  return host.limit > 0 ? std::min(cores, host.limit) : cores;
}

}  // namespace spillway
