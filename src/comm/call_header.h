// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace spillway {

enum class CallKind : std::int32_t {
  exchange,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  gather_bytes,
  barrier,
  ended,  // the rank's part is over
  failed  // with the reason as the note
};

/// Sizes in one direction between two ranks.
struct PieceSum {
  std::int64_t pieces = 0, bytes = 0;
  std::uint64_t sizes = 0;  // a hash of the list of sizes
  bool operator==(const PieceSum&) const = default;
  void add(std::int64_t size);
};

/// What a rank tells another before a call: enough to see that both are about to do the same, and to say what not.
struct CallHeader {
  std::array<char, 48> name{};
  std::array<char, 168> note{};
  std::int64_t sequence = 0;
  std::int64_t index = -1;
  PieceSum agreed;          // sizes that are the same on all ranks
  PieceSum sends;           // from the header's sender to its receiver
  PieceSum receives;        // the other way
  std::int64_t detail = 0;  // the root, or the element type
  CallKind kind = CallKind::barrier;
  std::int32_t rank = 0;
};
static_assert(sizeof(CallHeader) == 320);

template <std::size_t N>
void set_text(std::array<char, N>& to, std::string_view text) {
  to = {};
  text.substr(0, N - 1).copy(to.data(), N - 1);
}

/// The three orders of a communicator's calls.
enum class Channel : unsigned char { verbs, host, lane };
inline constexpr int kChannels = 3;

/// `all_gather "parameters" [3], call 17 of the verbs (2 pieces, 4.00 KiB)`.
std::string describe(const CallHeader& header, Channel channel);

/// Throws: RankError that names both sides, where the two ranks do not mean the same call.
void require_agreement(const CallHeader& mine, const CallHeader& theirs, Channel channel);

}  // namespace spillway
