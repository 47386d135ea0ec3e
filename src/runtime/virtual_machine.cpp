// SPDX-License-Identifier: Apache-2.0
#include "spillway/runtime/virtual_machine.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "spillway/core/error.h"

namespace spillway {
namespace {

class NoArena final : public Arena {
 public:
  std::byte* base() const override { return nullptr; }
};

class RecordingMachine final : public VirtualMachine {
 public:
  explicit RecordingMachine(VirtualMachineOptions options)
      : oracle_(make_seeded_oracle(std::move(options.oracle))),
        ledgers_{std::make_shared<MemoryLedger>(Tier::device, options.device_memory.value_or(Bytes{-1})),
                 std::make_shared<MemoryLedger>(Tier::pinned, options.host_memory.value_or(Bytes{-1})),
                 std::make_shared<MemoryLedger>(Tier::host, Bytes{-1})},
        network_(options.network ? make_virtual_lane("network", graph_) : nullptr) {}

  DeviceKind kind() const override { return DeviceKind::virtual_device; }
  ComputeLane& compute() override { return *compute_; }
  Lane& upload() override { return *upload_; }
  Lane& download() override { return *download_; }
  Lane& cpu() override { return *cpu_; }
  Lane& network() override {
    check(network_ != nullptr, "only several ranks have a network");
    return *network_;
  }
  ThreadTeam& cpu_team() override { return team_; }
  ThreadTeam& device_team() override { return team_; }
  Trace& trace() override { return trace_; }
  Oracle& oracle() override { return *oracle_; }
  void wait(const Ticket& ticket) override { graph_.wait(ticket, RecordedWait::Side::host); }
  const OpGraph& graph() const override { return graph_; }
  OpGraph take_graph() override { return std::move(graph_); }

  std::shared_ptr<MemoryLedger> ledger(Tier tier) override {
    require(tier != Tier::file, "the virtual machine has no file tier");
    return ledgers_[static_cast<std::size_t>(tier)];
  }
  std::unique_ptr<Pool> make_pool(Tier tier, Bytes size) override {
    return std::make_unique<Pool>(*ledger(tier), std::make_unique<NoArena>(), size);
  }

 private:
  const std::unique_ptr<Oracle> oracle_;
  const std::array<std::shared_ptr<MemoryLedger>, 3> ledgers_;
  Trace trace_{{false, 0, 0}};
  ThreadTeam team_{1};
  OpGraph graph_;
  const std::unique_ptr<ComputeLane> compute_ = make_virtual_compute_lane(graph_);
  const std::unique_ptr<Lane> download_ = make_virtual_lane("d2h", graph_);
  const std::unique_ptr<Lane> cpu_ = make_virtual_lane("cpu", graph_);
  const std::unique_ptr<Lane> upload_ = make_virtual_lane("h2d", graph_);
  const std::unique_ptr<Lane> network_;
};

}  // namespace

std::unique_ptr<VirtualMachine> make_virtual_machine(VirtualMachineOptions options) {
  if (options.device_memory) {
    require(options.device_memory->value > 0, fmt::format("device memory of {} bytes was asked for; expected more than "
                                                          "zero",
                                                          options.device_memory->value));
  }
  return std::make_unique<RecordingMachine>(std::move(options));
}

}  // namespace spillway
