// SPDX-License-Identifier: Apache-2.0
#include "runtime/stream_machine.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "runtime/network_context.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// Tickets that a step holds at once: three a chunk, two a slot and those of ops under way. The pool grows beyond it in
// the first steps of a run with more chunks than that.
constexpr int kEvents = 1024;

class StreamMachine final : public Machine {
 public:
  StreamMachine(const MachineOptions& options, StreamMachineParts parts)
      : parts_(std::move(parts)),
        trace_({true, options.trace_events, 0}),
        ledgers_{std::make_shared<MemoryLedger>(Tier::device, parts_.capacity),
                 std::make_shared<MemoryLedger>(Tier::pinned, options.host_memory.value_or(Bytes{-1})),
                 std::make_shared<MemoryLedger>(Tier::host, Bytes{-1})},
        host_work_(cpu_work(options.instruction_set)),
        cpu_team_(options.threads, options.cores),
        events_(parts_.device, kEvents),
        compute_(make_stream_compute_lane(parts_.current, events_, context(options))),
        communicator_(options.communicator),
        network_(options.communicator == nullptr
                     ? nullptr
                     : make_stream_lane("network", parts_.network, events_,
                                        network_context(context(options), *options.communicator))),
        download_(make_stream_lane("d2h", parts_.download, events_, context(options))),
        cpu_(make_host_lane("cpu", *parts_.device, context(options))),
        upload_(make_stream_lane("h2d", parts_.upload, events_, context(options))) {}

  DeviceKind kind() const override { return DeviceKind::cuda; }
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
  ThreadTeam& device_team() override { throw InternalError("a device with streams shares its work out by itself"); }
  const DeviceWork& device_work() const override { return *parts_.work; }
  bool host_reads_device() const override { return false; }
  Trace& trace() override { return trace_; }

  std::shared_ptr<MemoryLedger> ledger(Tier tier) override {
    require(tier != Tier::file, "this machine has no file tier");
    return ledgers_[static_cast<std::size_t>(tier)];
  }
  std::unique_ptr<Pool> make_pool(Tier tier, Bytes size) override {
    return std::make_unique<Pool>(*ledger(tier), parts_.make_arena(tier, size), size);
  }

 private:
  LaneContext context(const MachineOptions& options) { return {&trace_, options.delay}; }

  const StreamMachineParts parts_;
  Trace trace_;
  std::array<std::shared_ptr<MemoryLedger>, 3> ledgers_;
  const DeviceWork& host_work_;
  ThreadTeam cpu_team_;
  EventPool events_;
  std::unique_ptr<ComputeLane> compute_;
  Communicator* const communicator_;
  // Destroyed in reverse order, each issuing what it was given: those that wait for others go first.
  std::unique_ptr<Lane> network_, download_, cpu_, upload_;
};

}  // namespace

std::unique_ptr<Machine> make_stream_machine(const MachineOptions& options, StreamMachineParts parts) {
  require(options.threads >= 1,
          fmt::format("{} optimizer threads were asked for; expected at least 1", options.threads));
  return std::make_unique<StreamMachine>(options, std::move(parts));
}

}  // namespace spillway
