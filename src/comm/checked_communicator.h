// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/call_header.h"
#include "spillway/comm/communicator.h"

namespace spillway {

/// What all transports share: arguments checked, calls compared with those of the other ranks, bytes counted, and that
/// nothing works after a failure.
class CheckedCommunicator : public Communicator {
 public:
  struct Place {
    int rank = 0, size = 1, local_rank = 0, local_size = 1;
  };
  CheckedCommunicator(Place place, const CommOptions& options);

  int rank() const final { return place_.rank; }
  int size() const final { return place_.size; }
  int local_rank() const final { return place_.local_rank; }
  int local_size() const final { return place_.local_size; }
  bool uses_stream() const override { return false; }

  void exchange(CommCall call, std::span<const Send> sends, std::span<const Receive> receives, StreamRef stream) final;
  void all_gather(CommCall call, std::span<const GatherChunk> chunks, StreamRef stream) final;
  void reduce_scatter(CommCall call, std::span<const ScatterChunk> chunks, DType type, StreamRef stream) final;
  void all_reduce(CommCall call, std::span<const SumRun> runs, DType type, StreamRef stream) final;
  void broadcast(CommCall call, void* data, Bytes size, int root, StreamRef stream) final;
  std::vector<std::byte> gather_bytes(CommCall call, std::span<const std::byte> mine, CommOrder order) final;
  void barrier(CommCall call, CommOrder order) final;
  void fail(const std::string& why) noexcept final;
  WireBytes wire_bytes() const final { return {sent_.load(), received_.load()}; }

 protected:
  // ---- what a transport does ---------------------------------------------------------------------------------------

  /// Gives out[j] to rank j and takes in[j] from it; in[rank()] is left alone.
  virtual void swap(Channel channel, std::span<const CallHeader> out, std::span<CallHeader> in) = 0;
  /// Moves the pieces between different ranks; sizes agree on both sides.
  virtual void carry(Channel channel, std::span<const Send> sends, std::span<const Receive> receives,
                     StreamRef stream) = 0;
  virtual void sum_scatter(std::span<const ScatterChunk> chunks, DType type, StreamRef stream) = 0;
  virtual void sum_all(std::span<const SumRun> runs, DType type, StreamRef stream) = 0;
  /// By default made of pieces.
  virtual void gather(std::span<const GatherChunk> chunks, StreamRef stream);
  virtual void spread(void* data, Bytes size, int root, StreamRef stream);
  virtual void gather_small(Channel channel, std::span<const std::byte> mine, std::span<std::byte> all);
  /// Whether calls of a channel are compared.
  virtual bool compares(Channel) const { return true; }
  /// Tells the others, once.
  virtual void announce_failure(const std::string& why) noexcept = 0;

  // ---- for transports ----------------------------------------------------------------------------------------------

  const CommOptions& options() const { return options_; }
  bool failed() const;
  /// For a call that waits. Throws: RankError with what another thread of this rank failed by.
  void throw_if_failed() const;
  /// To be called first by the destructor of a transport. Tells the others that this rank failed where it is destroyed
  /// by an exception. Returns whether it has not failed.
  bool end_orderly() noexcept;
  /// Meets the other ranks where all end this channel. Throws: RankError where another does something else.
  void agree_to_end(Channel channel) { agree(channel, begin(channel, CallKind::ended, {}), {}, {}); }
  /// What is waited in now, for messages. Threads: the channel's.
  const CallHeader& current(Channel channel) const { return current_[static_cast<std::size_t>(channel)]; }
  /// Throws: RankError for a wait that took too long, on the ranks listed.
  [[noreturn]] void throw_timeout(Channel channel, const std::vector<int>& waiting_for, std::int64_t since_ns) const;

 private:
  template <class Body>
  void guarded(const Body& body);
  CallHeader begin(Channel channel, CallKind kind, CommCall call);
  void agree(Channel channel, const CallHeader& header, std::span<const Send> sends, std::span<const Receive> receives);
  void require_rank(CommCall call, int other) const;
  void require_parts(CommCall call, std::size_t parts) const;
  void count(std::int64_t sent, std::int64_t received);
  void note_failure(const std::string& why, bool announce) noexcept;

  const Place place_;
  const CommOptions options_;
  const int unwinding_at_birth_;
  std::array<CallHeader, kChannels> current_;
  std::array<std::int64_t, kChannels> sequence_{};
  std::array<std::vector<CallHeader>, kChannels> out_, in_;
  std::vector<Send> sends_;  // of the verbs, kept from call to call
  std::vector<Receive> receives_;
  std::atomic<std::int64_t> sent_{0}, received_{0};
  mutable std::mutex failure_mutex_;
  std::string failure_;  // empty: none
};

/// Now, on a clock that is not set.
std::int64_t steady_ns();

}  // namespace spillway
