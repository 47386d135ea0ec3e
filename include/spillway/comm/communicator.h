// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "spillway/core/dtype.h"
#include "spillway/core/units.h"
#include "spillway/device/device.h"

namespace spillway {

/// What a call is about: errors name it, and ranks whose calls have different names disagree.
struct CommCall {
  const char* name = "";    // a literal; messages show its first 47 characters
  std::int64_t index = -1;  // the bucket or chunk it concerns; below zero: none
};

/// One piece of an exchange. Pieces from one rank to another are matched in the order in which they are listed.
struct Send {
  const void* data = nullptr;
  Bytes size;
  int to = 0;
};
struct Receive {
  void* data = nullptr;
  Bytes size;
  int from = 0;
};

/// One chunk of an all_gather: the shards of all ranks, one behind the other.
struct GatherChunk {
  const void* shard = nullptr;    // this rank's; may stand at its place in `whole`, else outside of it
  void* whole = nullptr;          // receives all
  std::span<const Bytes> shards;  // the size of each rank's, the same list on all ranks
};

/// One chunk of a reduce_scatter. `shard` lies outside of `whole`.
struct ScatterChunk {
  const void* whole = nullptr;           // this rank's values
  void* shard = nullptr;                 // receives the sum of this rank's part
  std::span<const std::int64_t> counts;  // elements of each rank's part, the same list on all ranks
};

/// One run of values that an all_reduce replaces by their sum.
struct SumRun {
  void* data = nullptr;
  std::int64_t count = 0;
};

/// Small exchanges come in two orders, so that the thread that trains and the network lane do not wait for each other.
enum class CommOrder : unsigned char { host, lane };

struct CommOptions {
  /// How long a call waits for the other ranks before it says on whom. Ranks may be apart by what a checkpoint takes.
  Seconds timeout{600};
  /// NCCL only: compares the ranks' calls before each, through the store. Other transports always do.
  bool check_calls = false;
  /// MPI only: larger pieces go in parts. At most 1 GiB, since MPI counts in 31 bits.
  Bytes largest_message{std::int64_t{1} << 30};
};

/// Bytes of values that this rank gave to and took from other ranks. Comparing calls costs another 320 bytes to and
/// from each rank a call, which are not counted.
struct WireBytes {
  std::int64_t sent = 0, received = 0;
  bool operator==(const WireBytes&) const = default;
};

/// The ranks of a run and what they tell each other.
///
/// Order: all ranks make the same calls in the same order, in each of three orders of their own: the verbs, and the
/// small exchanges of either CommOrder. Host transports compare the calls first: where ranks disagree, each of them
/// gets an error that names both sides. Data is complete on return; with a stream (NCCL) in the stream's order.
/// Destroying it ends the rank's part: in an exception's unwinding the others are told that it failed, else that it
/// ended, and what they still expect of it fails.
/// Threads: one at a time in each of the three orders.
/// Throws: RankError for ranks that disagree, failed, ended or were waited for beyond the timeout; every later call
/// then throws it too.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Among the ranks of this host, which share its memory and cores.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  /// "one rank", "threads", "MPI", "NCCL".
  virtual std::string_view transport() const = 0;
  /// Whether verbs are given to a stream and take device memory; else they take host memory and an empty stream.
  virtual bool uses_stream() const = 0;

  // ---- verbs: with n ranks, Blocks: until the data is there (host transports) --------------------------------------

  /// Pieces from rank to rank, all in one group; those to this rank itself are copied. Buffers do not overlap.
  /// Wire: sends its pieces to other ranks, receives theirs.
  virtual void exchange(CommCall call, std::span<const Send> sends, std::span<const Receive> receives,
                        StreamRef stream = {}) = 0;
  /// Every rank gets every shard of all chunks. Wire, a chunk: sends its shard n-1 times, receives the whole less its
  /// own shard; (n-1)/n of the whole each way where shards are equal.
  virtual void all_gather(CommCall call, std::span<const GatherChunk> chunks, StreamRef stream = {}) = 0;
  /// Sums in the transport's own order and precision: outside the promise of equal bits, except for i64. `type`: f32,
  /// bf16, f16 or i64. Wire, a chunk: sends the whole less its own part, receives n-1 times its part.
  virtual void reduce_scatter(CommCall call, std::span<const ScatterChunk> chunks, DType type,
                              StreamRef stream = {}) = 0;
  /// As reduce_scatter, every rank gets all sums. Wire: 2(n-1)/n of the bytes each way, whatever way they go.
  virtual void all_reduce(CommCall call, std::span<const SumRun> runs, DType type, StreamRef stream = {}) = 0;
  /// Wire: `root` sends n-1 times, each other rank receives once.
  virtual void broadcast(CommCall call, void* data, Bytes size, int root, StreamRef stream = {}) = 0;

  // ---- small exchanges of host memory. Blocks: until all ranks have called
  // -------------------------------------------

  /// The ranks' `mine`, all of one size, in rank order. Wire: as all_gather.
  virtual std::vector<std::byte> gather_bytes(CommCall call, std::span<const std::byte> mine,
                                              CommOrder order = CommOrder::host) = 0;
  virtual void barrier(CommCall call, CommOrder order = CommOrder::host) = 0;

  template <class T>
  std::vector<T> gather_all(CommCall call, const T& mine, CommOrder order = CommOrder::host) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::vector<std::byte> bytes = gather_bytes(call, std::as_bytes(std::span(&mine, 1)), order);
    std::vector<T> all(static_cast<std::size_t>(size()));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(all.data()));
    return all;
  }
  /// Whether all ranks gave the same bytes.
  bool all_equal(CommCall call, std::span<const std::byte> mine, CommOrder order = CommOrder::host);
  /// Replaces each value by its sum over ranks, exactly (modulo 2^64, as limbs of a larger number carry).
  void sum(CommCall call, std::span<std::int64_t> values, CommOrder order = CommOrder::host);
  /// Whether any rank says so.
  bool any(CommCall call, bool mine, CommOrder order = CommOrder::host);

  /// Tells the others that this rank cannot go on, and why: calls that they wait in fail, now or at their next one.
  virtual void fail(const std::string& why) noexcept = 0;

  virtual WireBytes wire_bytes() const = 0;

 protected:
  Communicator() = default;
};

}  // namespace spillway
