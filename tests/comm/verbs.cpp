// SPDX-License-Identifier: Apache-2.0
#include "comm/verbs.h"

#include <cstring>
#include <numeric>
#include <stdexcept>

namespace spillway::test {
namespace {

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("wrong: " + what);
}

// A byte that depends on who sends it to whom, in which piece, where.
std::byte pattern(int from, int to, int piece, std::int64_t at) {
  return static_cast<std::byte>(from * 131 + to * 31 + piece * 17 + at * 7 + (at >> 8));
}

using Buffer = std::vector<std::byte>;

Buffer filled(int from, int to, int piece, std::int64_t size) {
  Buffer buffer(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) buffer[static_cast<std::size_t>(i)] = pattern(from, to, piece, i);
  return buffer;
}

Bytes bytes_of(const Buffer& buffer) {
  return {static_cast<std::int64_t>(buffer.size())};
}

// Odd, different for each pair and piece, none for some.
std::int64_t odd_size(int from, int to, int piece) {
  static constexpr std::int64_t kSizes[] = {0, 1, 3, 17, 1023, 4097, 65537, 300001};
  return kSizes[(from * 5 + to * 3 + piece) % 8];
}

void exchange_pieces(Communicator& comm) {
  constexpr int kPieces = 5;
  std::vector<Buffer> outgoing, incoming;
  std::vector<Send> sends;
  std::vector<Receive> receives;
  outgoing.reserve(kPieces * 16);
  incoming.reserve(kPieces * 16);
  WireBytes expected;
  for (int other = 0; other < comm.size(); ++other) {
    for (int piece = 0; piece < kPieces; ++piece) {
      outgoing.push_back(filled(comm.rank(), other, piece, odd_size(comm.rank(), other, piece)));
      sends.push_back({outgoing.back().data(), bytes_of(outgoing.back()), other});
      incoming.emplace_back(static_cast<std::size_t>(odd_size(other, comm.rank(), piece)));
      receives.push_back({incoming.back().data(), bytes_of(incoming.back()), other});
      if (other == comm.rank()) continue;
      expected.sent += sends.back().size.value;
      expected.received += receives.back().size.value;
    }
  }
  const WireBytes before = comm.wire_bytes();
  comm.exchange({"pieces", 3}, sends, receives);
  for (int other = 0, at = 0; other < comm.size(); ++other) {
    for (int piece = 0; piece < kPieces; ++piece, ++at) {
      expect(incoming[static_cast<std::size_t>(at)] ==
                 filled(other, comm.rank(), piece, odd_size(other, comm.rank(), piece)),
             "piece " + std::to_string(piece) + " from rank " + std::to_string(other));
    }
  }
  const WireBytes after = comm.wire_bytes();
  expect(after.sent - before.sent == expected.sent && after.received - before.received == expected.received,
         "the wire bytes of an exchange");
}

void exchange_nothing(Communicator& comm) {
  const WireBytes before = comm.wire_bytes();
  comm.exchange({"nothing"}, {}, {});
  expect(comm.wire_bytes() == before, "bytes of an exchange of nothing");
}

void gather_uneven_chunks(Communicator& comm) {
  constexpr int kChunks = 4;
  std::vector<Buffer> wholes;
  std::vector<std::vector<Bytes>> shards;
  std::vector<Buffer> own;
  wholes.reserve(kChunks);
  own.reserve(kChunks);
  std::vector<GatherChunk> chunks;
  std::int64_t total = 0, mine = 0;
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    std::vector<Bytes> sizes;
    std::int64_t before = 0, whole = 0;
    for (int rank = 0; rank < comm.size(); ++rank) {
      sizes.push_back({odd_size(rank, 0, chunk)});
      if (rank < comm.rank()) before += sizes.back().value;
      whole += sizes.back().value;
    }
    const std::int64_t size = odd_size(comm.rank(), 0, chunk);
    total += whole;
    mine += size;
    shards.push_back(sizes);
    wholes.emplace_back(static_cast<std::size_t>(whole));
    own.push_back(filled(comm.rank(), 0, chunk, size));
    const bool in_place = chunk % 2 == 1;
    if (in_place) std::copy(own.back().begin(), own.back().end(), wholes.back().begin() + before);
    chunks.push_back({in_place ? wholes.back().data() + before : own.back().data(), wholes.back().data(), {}});
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i].shards = shards[i];
  const WireBytes before = comm.wire_bytes();
  comm.all_gather({"uneven", 7}, chunks);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    Buffer all;
    for (int rank = 0; rank < comm.size(); ++rank) {
      const Buffer part = filled(rank, 0, chunk, odd_size(rank, 0, chunk));
      all.insert(all.end(), part.begin(), part.end());
    }
    expect(wholes[static_cast<std::size_t>(chunk)] == all, "gathered chunk " + std::to_string(chunk));
  }
  const WireBytes after = comm.wire_bytes();
  expect(after.sent - before.sent == mine * (comm.size() - 1) && after.received - before.received == total - mine,
         "the wire bytes of an all_gather");
}

// 16-bit patterns of small whole numbers, whose sums are exact.
std::uint16_t bf16_of(int value) {
  const auto wide = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &wide, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}
std::uint16_t f16_of(int value) {  // 0 to 2047
  if (value == 0) return 0;
  int exponent = 0;
  while ((value >> exponent) > 1) ++exponent;
  return static_cast<std::uint16_t>(((exponent + 15) << 10) | ((value << (10 - exponent)) & 0x3ff));
}

void put(DType type, std::byte* at, int value) {
  const auto wide = static_cast<float>(value);
  const std::int64_t whole = value;
  const std::uint16_t half = type == DType::bf16 ? bf16_of(value) : f16_of(value);
  const void* from = type == DType::f32   ? static_cast<const void*>(&wide)
                     : type == DType::i64 ? static_cast<const void*>(&whole)
                                          : static_cast<const void*>(&half);
  std::memcpy(at, from, static_cast<std::size_t>(size_of(type)));
}

int value_at(int rank, std::int64_t i) {
  return static_cast<int>((i * 3 + rank) % 11);
}

Buffer values_of(DType type, int rank, std::int64_t count) {
  Buffer buffer(static_cast<std::size_t>(count * size_of(type)));
  for (std::int64_t i = 0; i < count; ++i) put(type, buffer.data() + i * size_of(type), value_at(rank, i));
  return buffer;
}
Buffer sums_of(DType type, int ranks, std::int64_t begin, std::int64_t count) {
  Buffer buffer(static_cast<std::size_t>(count * size_of(type)));
  for (std::int64_t i = 0; i < count; ++i) {
    int total = 0;
    for (int rank = 0; rank < ranks; ++rank) total += value_at(rank, begin + i);
    put(type, buffer.data() + i * size_of(type), total);
  }
  return buffer;
}

void scatter_sums(Communicator& comm) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16, DType::i64}) {
    std::vector<std::vector<std::int64_t>> counts(3);
    std::vector<Buffer> wholes, shards;
    std::vector<ScatterChunk> chunks;
    std::int64_t total = 0, mine = 0;
    for (int chunk = 0; chunk < 3; ++chunk) {
      for (int rank = 0; rank < comm.size(); ++rank) {
        counts[static_cast<std::size_t>(chunk)].push_back(odd_size(rank, 1, chunk) / 3);
      }
      const std::vector<std::int64_t>& parts = counts[static_cast<std::size_t>(chunk)];
      wholes.push_back(values_of(type, comm.rank(), std::accumulate(parts.begin(), parts.end(), std::int64_t{0})));
      shards.emplace_back(static_cast<std::size_t>(parts[static_cast<std::size_t>(comm.rank())] * size_of(type)));
      total += bytes_of(wholes.back()).value;
      mine += bytes_of(shards.back()).value;
    }
    for (std::size_t i = 0; i < 3; ++i) chunks.push_back({wholes[i].data(), shards[i].data(), counts[i]});
    const WireBytes before = comm.wire_bytes();
    comm.reduce_scatter({"sums"}, chunks, type);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto own = counts[i].begin() + comm.rank();
      const std::int64_t begin = std::accumulate(counts[i].begin(), own, std::int64_t{0});
      expect(shards[i] == sums_of(type, comm.size(), begin, *own), "scattered sums of " + std::string(to_string(type)));
    }
    const WireBytes after = comm.wire_bytes();
    expect(after.sent - before.sent == total - mine && after.received - before.received == mine * (comm.size() - 1),
           "the wire bytes of a reduce_scatter");
  }
}

void sum_runs(Communicator& comm) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16, DType::i64}) {
    std::vector<Buffer> buffers;
    std::vector<SumRun> runs;
    std::int64_t total = 0;
    for (const std::int64_t count : {0, 1, 2, 5001, 70003}) buffers.push_back(values_of(type, comm.rank(), count));
    for (Buffer& buffer : buffers) {
      runs.push_back({buffer.data(), bytes_of(buffer).value / size_of(type)});
      total += bytes_of(buffer).value;
    }
    const WireBytes before = comm.wire_bytes();
    comm.all_reduce({"totals"}, runs, type);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      expect(buffers[i] == sums_of(type, comm.size(), 0, runs[i].count), "sums of " + std::string(to_string(type)));
    }
    const std::int64_t each_way = 2 * total * (comm.size() - 1) / comm.size();
    expect(comm.wire_bytes() == WireBytes{before.sent + each_way, before.received + each_way},
           "the wire bytes of an all_reduce");
  }
}

void broadcast_from_each(Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::int64_t size : {0, 1, 70001}) {
      const Buffer expected = filled(root, 0, 9, size);
      Buffer data = comm.rank() == root ? expected : Buffer(static_cast<std::size_t>(size));
      const WireBytes before = comm.wire_bytes();
      comm.broadcast({"weights", root}, data.data(), {size}, root);
      expect(data == expected, "broadcast from rank " + std::to_string(root));
      const WireBytes moved = comm.rank() == root ? WireBytes{size * (comm.size() - 1), 0} : WireBytes{0, size};
      expect(comm.wire_bytes() == WireBytes{before.sent + moved.sent, before.received + moved.received},
             "the wire bytes of a broadcast");
    }
  }
}

void small_exchanges(Communicator& comm) {
  struct Row {
    double weight = 0;
    std::int64_t tokens = 0;
  };
  for (const CommOrder order : {CommOrder::host, CommOrder::lane}) {
    const auto rows = comm.gather_all({"rows"}, Row{0.5 * comm.rank(), comm.rank() * 100}, order);
    expect(rows.size() == static_cast<std::size_t>(comm.size()), "one row a rank");
    for (int rank = 0; rank < comm.size(); ++rank) {
      const Row& row = rows[static_cast<std::size_t>(rank)];
      expect(row.weight == 0.5 * rank && row.tokens == rank * 100, "the row of rank " + std::to_string(rank));
    }
    std::vector<std::int64_t> limbs = {comm.rank() + 1, INT64_MAX, -5};
    comm.sum({"limbs"}, limbs, order);
    const std::int64_t n = comm.size();
    expect(limbs[0] == n * (n + 1) / 2 && limbs[2] == -5 * n, "sums of integers");
    expect(limbs[1] == static_cast<std::int64_t>(static_cast<std::uint64_t>(INT64_MAX) * static_cast<std::uint64_t>(n)),
           "sums that carry wrap");
    expect(comm.any({"any"}, comm.rank() == comm.size() - 1, order), "one of the ranks says so");
    expect(!comm.any({"none"}, false, order), "no rank says so");
    const std::int64_t same = 42, other = comm.rank();
    expect(comm.all_equal({"same"}, std::as_bytes(std::span(&same, 1)), order), "equal bytes are equal");
    expect(comm.all_equal({"other"}, std::as_bytes(std::span(&other, 1)), order) == (comm.size() == 1),
           "different bytes are different");
    expect(comm.all_equal({"empty"}, {}, order), "nothing equals nothing");
    comm.barrier({"barrier"}, order);
  }
}

}  // namespace

std::vector<VerbCase> verb_cases() {
  return {{"exchange", exchange_pieces},
          {"exchange_nothing", exchange_nothing},
          {"all_gather", gather_uneven_chunks},
          {"reduce_scatter", scatter_sums},
          {"all_reduce", sum_runs},
          {"broadcast", broadcast_from_each},
          {"small", small_exchanges}};
}

}  // namespace spillway::test
