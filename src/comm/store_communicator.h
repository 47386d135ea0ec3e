// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "comm/checked_communicator.h"
#include "spillway/comm/launch.h"
#include "spillway/comm/store.h"

namespace spillway {

/// The prefix of a rank's next communicator on a store: of the launcher's present attempt, and other than those of the
/// communicators that the rank made on it before. Ranks make theirs in one order.
std::string next_prefix(Store& store, const Launch& launch);

/// A communicator whose small exchanges, comparison of calls and failures go through a store; verbs are its heir's.
class StoreCommunicator : public CheckedCommunicator {
 public:
  /// `prefix` of the keys: each communicator of a store has its own. The store must outlive it.
  StoreCommunicator(Place place, Store& store, std::string prefix, const CommOptions& options);

 protected:
  void swap(Channel channel, std::span<const CallHeader> out, std::span<CallHeader> in) override;
  void gather_small(Channel channel, std::span<const std::byte> mine, std::span<std::byte> all) override;
  bool compares(Channel channel) const override { return channel != Channel::verbs || options().check_calls; }
  void announce_failure(const std::string& why) noexcept override;

  /// To be called by the heir's destructor, in place of end_orderly(): ranks meet, and rank 0, which may serve the
  /// store, leaves last. Returns whether this went well.
  bool end_together() noexcept;
  /// What a rank announced last of its failure; empty where none has failed. Threads: any. Throws: RankError where the
  /// store does not answer.
  std::string announced_failure();
  /// A value that rank 0 makes, on all ranks.
  std::vector<std::byte> share(const std::string& name, std::span<const std::byte> of_rank_0);

 private:
  std::string key(Channel channel, std::int64_t sequence, char phase, int rank) const;
  std::string key(const std::string& name) const { return prefix_ + name; }
  /// Blocks: until the other ranks have set their values of the channel's present call; `taken` gets each with its
  /// rank.
  template <class Taken>
  void wait_for_all(Channel channel, char phase, const Taken& taken);
  void require_no_failure(Channel channel);

  Store& store_;
  const std::string prefix_;
};

}  // namespace spillway
