// SPDX-License-Identifier: Apache-2.0
#include "comm/call_header.h"

#include <fmt/format.h>

#include "spillway/core/dtype.h"
#include "spillway/core/error.h"
#include "spillway/core/units.h"

namespace spillway {
namespace {

const char* word(CallKind kind) {
  static constexpr std::array<const char*, 9> kWords = {"exchange",   "all_gather", "reduce_scatter",
                                                        "all_reduce", "broadcast",  "gather_bytes",
                                                        "barrier",    "(ended)",    "(failed)"};
  return kWords[static_cast<std::size_t>(kind)];
}

const char* word(Channel channel) {
  static constexpr std::array<const char*, kChannels> kWords = {"verbs", "host's exchanges", "lane's exchanges"};
  return kWords[static_cast<std::size_t>(channel)];
}

std::string describe(const PieceSum& sum) {
  return fmt::format("{} piece{}, {} bytes", sum.pieces, sum.pieces == 1 ? "" : "s", sum.bytes);
}

std::string describe_detail(const CallHeader& header) {
  switch (header.kind) {
    case CallKind::reduce_scatter:
    case CallKind::all_reduce:
      return fmt::format(" of {}", to_string(static_cast<DType>(header.detail)));
    case CallKind::broadcast:
      return fmt::format(" from rank {}", header.detail);
    default:
      return {};
  }
}

bool same_call(const CallHeader& a, const CallHeader& b) {
  return a.kind == b.kind && a.name == b.name && a.index == b.index && a.sequence == b.sequence &&
         a.agreed == b.agreed && a.detail == b.detail;
}

// The two directions of an exchange between two ranks are what each expects of the other.
void require_pieces(const CallHeader& from, const PieceSum& sent, const CallHeader& to, const PieceSum& expected,
                    Channel channel) {
  if (sent == expected) return;
  const bool order = sent.pieces == expected.pieces && sent.bytes == expected.bytes;
  throw RankError(fmt::format("ranks {} and {} disagree in {}: rank {} sends {} to rank {}, which expects {}{}",
                              from.rank, to.rank, describe(from, channel), from.rank, describe(sent), to.rank,
                              describe(expected), order ? ", but other sizes one by one" : ""));
}

}  // namespace

void PieceSum::add(std::int64_t size) {
  ++pieces;
  bytes += size;
  sizes = (sizes ^ static_cast<std::uint64_t>(size)) * 0x9e3779b97f4a7c15u;
  sizes ^= sizes >> 29;
}

std::string describe(const CallHeader& header, Channel channel) {
  const std::string index = header.index < 0 ? "" : fmt::format(" [{}]", header.index);
  const std::string sizes = header.kind == CallKind::exchange || header.kind == CallKind::barrier
                                ? ""
                                : fmt::format(" ({})", describe(header.agreed));
  return fmt::format("{}{} \"{}\"{}, call {} of the {}{}", word(header.kind), describe_detail(header),
                     header.name.data(), index, header.sequence, word(channel), sizes);
}

void require_agreement(const CallHeader& mine, const CallHeader& theirs, Channel channel) {
  if (theirs.kind == CallKind::failed) {
    throw RankError(fmt::format("rank {} failed: {} (rank {} was in {})", theirs.rank, theirs.note.data(), mine.rank,
                                describe(mine, channel)));
  }
  if (theirs.kind == CallKind::ended && mine.kind != CallKind::ended) {
    throw RankError(
        fmt::format("rank {} has ended its part of the run before call {} of the {}, while rank {} calls {}: "
                    "every rank makes the same calls",
                    theirs.rank, theirs.sequence, word(channel), mine.rank, describe(mine, channel)));
  }
  if (!same_call(mine, theirs)) {
    const bool sizes = mine.kind == theirs.kind && mine.name == theirs.name && mine.index == theirs.index &&
                       mine.agreed.pieces == theirs.agreed.pieces && mine.agreed.bytes == theirs.agreed.bytes &&
                       mine.detail == theirs.detail;
    throw RankError(fmt::format("ranks {} and {} disagree: rank {} calls {}, rank {} calls {}{}", mine.rank,
                                theirs.rank, mine.rank, describe(mine, channel), theirs.rank, describe(theirs, channel),
                                sizes ? ", with other sizes one by one" : ""));
  }
  require_pieces(mine, mine.sends, theirs, theirs.receives, channel);
  require_pieces(theirs, theirs.sends, mine, mine.receives, channel);
}

}  // namespace spillway
