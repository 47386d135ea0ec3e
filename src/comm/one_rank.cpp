// SPDX-License-Identifier: Apache-2.0
#include "comm/checked_communicator.h"
#include "spillway/comm/transports.h"
#include "spillway/device/gpu.h"

namespace spillway {
namespace {

class OneRank final : public CheckedCommunicator {
 public:
  OneRank() : CheckedCommunicator({}, {}) {}

  std::string_view transport() const override { return "one rank"; }

 private:
  void swap(Channel, std::span<const CallHeader>, std::span<CallHeader>) override {}
  void carry(Channel, std::span<const Send>, std::span<const Receive>, StreamRef) override {}
  void sum_scatter(std::span<const ScatterChunk> chunks, DType type, StreamRef stream) override {
    for (const ScatterChunk& chunk : chunks) {
      const Bytes bytes{chunk.counts[0] * size_of(type)};
      if (bytes.value > 0) copy_async(stream, chunk.shard, chunk.whole, bytes);
    }
  }
  void sum_all(std::span<const SumRun>, DType, StreamRef) override {}
  void announce_failure(const std::string&) noexcept override {}
};

}  // namespace

std::unique_ptr<Communicator> make_one_rank() {
  return std::make_unique<OneRank>();
}

}  // namespace spillway
