// SPDX-License-Identifier: Apache-2.0
#include "comm/checked_communicator.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <exception>

#include "spillway/core/error.h"
#include "spillway/device/gpu.h"

namespace spillway {
namespace {

Channel channel_of(CommOrder order) {
  return order == CommOrder::host ? Channel::host : Channel::lane;
}

template <class T>
std::byte* at_byte(T* base, std::int64_t offset) {
  return static_cast<std::byte*>(const_cast<std::remove_const_t<T>*>(base)) + offset;
}

void require_summable(DType type) {
  require(type == DType::f32 || type == DType::bf16 || type == DType::f16 || type == DType::i64,
          fmt::format("ranks sum fp32, bf16, fp16 and i64, not {}", to_string(type)));
}

// Pieces from this rank to itself, in their order.
void copy_own(int rank, std::span<const Send> sends, std::span<const Receive> receives, StreamRef stream) {
  auto receive = receives.begin();
  for (const Send& send : sends) {
    if (send.to != rank) continue;
    while (receive->from != rank) ++receive;
    if (send.size.value > 0) copy_async(stream, receive->data, send.data, send.size);
    ++receive;
  }
}

}  // namespace

std::int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

CheckedCommunicator::CheckedCommunicator(Place place, const CommOptions& options)
    : place_(place), options_(options), unwinding_at_birth_(std::uncaught_exceptions()) {
  require(options.timeout.value > 0,
          fmt::format("the timeout of ranks is {} s; expected more than 0", options.timeout.value));
  for (auto* headers : {&out_, &in_}) {
    for (auto& each : *headers) each.resize(static_cast<std::size_t>(place.size));
  }
}

// ---- failure -------------------------------------------------------------------------------------------------------

bool CheckedCommunicator::failed() const {
  const std::scoped_lock lock(failure_mutex_);
  return !failure_.empty();
}

void CheckedCommunicator::throw_if_failed() const {
  const std::scoped_lock lock(failure_mutex_);
  if (!failure_.empty()) throw RankError("another thread of this rank failed: " + failure_);
}

void CheckedCommunicator::note_failure(const std::string& why, bool announce) noexcept {
  {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.empty()) return;
    failure_ = why;
  }
  if (announce) announce_failure(why);
}

void CheckedCommunicator::fail(const std::string& why) noexcept {
  note_failure(why.empty() ? "no reason was given" : why, true);
}

bool CheckedCommunicator::end_orderly() noexcept {
  if (std::uncaught_exceptions() > unwinding_at_birth_) fail("it ended by an exception");
  return !failed();
}

void CheckedCommunicator::throw_timeout(Channel channel, const std::vector<int>& waiting_for,
                                        std::int64_t since_ns) const {
  const auto waited = std::chrono::nanoseconds(steady_ns() - since_ns);
  const auto began = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now() - waited);
  throw RankError(fmt::format(
      "rank {} of {} has waited {:.1f} s (since {:%H:%M:%S} UTC) in {} for rank{} {}, which did not come to it: look "
      "for "
      "what held it up in its output, or raise the timeout of ranks",
      rank(), size(), std::chrono::duration<double>(waited).count(), fmt::gmtime(began),
      describe(current(channel), channel), waiting_for.size() == 1 ? "" : "s", fmt::join(waiting_for, ", ")));
}

template <class Body>
void CheckedCommunicator::guarded(const Body& body) {
  {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.empty()) throw RankError("the ranks can no longer work together: " + failure_);
  }
  try {
    body();
  } catch (const std::exception& error) {
    note_failure(error.what(), true);
    throw;
  }
}

// ---- agreement
// -------------------------------------------------------------------------------------------------------

CallHeader CheckedCommunicator::begin(Channel channel, CallKind kind, CommCall call) {
  CallHeader header;
  set_text(header.name, call.name);
  header.index = call.index;
  header.kind = kind;
  header.rank = rank();
  header.sequence = sequence_[static_cast<std::size_t>(channel)]++;
  return header;
}

void CheckedCommunicator::agree(Channel channel, const CallHeader& header, std::span<const Send> sends,
                                std::span<const Receive> receives) {
  const auto at = static_cast<std::size_t>(channel);
  current_[at] = header;
  std::vector<CallHeader>&out = out_[at], &in = in_[at];
  std::fill(out.begin(), out.end(), header);
  for (const Send& send : sends) out[static_cast<std::size_t>(send.to)].sends.add(send.size.value);
  for (const Receive& receive : receives) out[static_cast<std::size_t>(receive.from)].receives.add(receive.size.value);
  const auto self = static_cast<std::size_t>(rank());
  in[self] = out[self];
  if (!compares(channel)) return require_agreement(out[self], in[self], channel);
  swap(channel, out, in);
  // What a rank does with itself stands in one header, whose two directions must be equal.
  for (std::size_t i = 0; i < in.size(); ++i) require_agreement(out[i], in[i], channel);
}

void CheckedCommunicator::require_rank(CommCall call, int other) const {
  require(other >= 0 && other < size(),
          fmt::format("\"{}\" names rank {}, but there are ranks 0 to {}", call.name, other, size() - 1));
}

void CheckedCommunicator::require_parts(CommCall call, std::size_t parts) const {
  require(parts == static_cast<std::size_t>(size()),
          fmt::format("a chunk of \"{}\" has {} parts for {} ranks: expected one each", call.name, parts, size()));
}

void CheckedCommunicator::count(std::int64_t sent, std::int64_t received) {
  sent_ += sent;
  received_ += received;
}

// ---- verbs
// -----------------------------------------------------------------------------------------------------------

// A wrong argument is a failure of this rank too: the others wait for a call that does not come.

void CheckedCommunicator::exchange(CommCall call, std::span<const Send> sends, std::span<const Receive> receives,
                                   StreamRef stream) {
  guarded([&] {
    std::int64_t sent = 0, received = 0;
    const auto wire = [&](int other, Bytes bytes) {
      require_rank(call, other);
      return other == rank() ? 0 : bytes.value;
    };
    for (const Send& send : sends) sent += wire(send.to, send.size);
    for (const Receive& receive : receives) received += wire(receive.from, receive.size);
    agree(Channel::verbs, begin(Channel::verbs, CallKind::exchange, call), sends, receives);
    copy_own(rank(), sends, receives, stream);
    carry(Channel::verbs, sends, receives, stream);
    count(sent, received);
  });
}

void CheckedCommunicator::all_gather(CommCall call, std::span<const GatherChunk> chunks, StreamRef stream) {
  guarded([&] {
    CallHeader header = begin(Channel::verbs, CallKind::all_gather, call);
    std::int64_t own = 0;
    for (const GatherChunk& chunk : chunks) {
      require_parts(call, chunk.shards.size());
      own += chunk.shards[static_cast<std::size_t>(rank())].value;
      for (const Bytes shard : chunk.shards) header.agreed.add(shard.value);
    }
    agree(Channel::verbs, header, {}, {});
    gather(chunks, stream);
    count(own * (size() - 1), header.agreed.bytes - own);
  });
}

void CheckedCommunicator::reduce_scatter(CommCall call, std::span<const ScatterChunk> chunks, DType type,
                                         StreamRef stream) {
  guarded([&] {
    require_summable(type);
    CallHeader header = begin(Channel::verbs, CallKind::reduce_scatter, call);
    header.detail = static_cast<std::int64_t>(type);
    std::int64_t own = 0;
    for (const ScatterChunk& chunk : chunks) {
      require_parts(call, chunk.counts.size());
      own += chunk.counts[static_cast<std::size_t>(rank())] * size_of(type);
      for (const std::int64_t part : chunk.counts) header.agreed.add(part * size_of(type));
    }
    agree(Channel::verbs, header, {}, {});
    sum_scatter(chunks, type, stream);
    count(header.agreed.bytes - own, own * (size() - 1));
  });
}

void CheckedCommunicator::all_reduce(CommCall call, std::span<const SumRun> runs, DType type, StreamRef stream) {
  guarded([&] {
    require_summable(type);
    CallHeader header = begin(Channel::verbs, CallKind::all_reduce, call);
    header.detail = static_cast<std::int64_t>(type);
    for (const SumRun& run : runs) header.agreed.add(run.count * size_of(type));
    agree(Channel::verbs, header, {}, {});
    sum_all(runs, type, stream);
    const std::int64_t each_way = 2 * header.agreed.bytes * (size() - 1) / size();
    count(each_way, each_way);
  });
}

void CheckedCommunicator::broadcast(CommCall call, void* data, Bytes bytes, int root, StreamRef stream) {
  guarded([&] {
    require_rank(call, root);
    CallHeader header = begin(Channel::verbs, CallKind::broadcast, call);
    header.detail = root;
    header.agreed.add(bytes.value);
    agree(Channel::verbs, header, {}, {});
    spread(data, bytes, root, stream);
    count(root == rank() ? bytes.value * (size() - 1) : 0, root == rank() ? 0 : bytes.value);
  });
}

// ---- made of pieces
// --------------------------------------------------------------------------------------------------

void CheckedCommunicator::gather(std::span<const GatherChunk> chunks, StreamRef stream) {
  sends_.clear();
  receives_.clear();
  for (const GatherChunk& chunk : chunks) {
    std::int64_t offset = 0;
    for (int other = 0; other < size(); ++other) {
      const Bytes theirs = chunk.shards[static_cast<std::size_t>(other)];
      std::byte* place = at_byte(chunk.whole, offset);
      offset += theirs.value;
      if (other != rank()) {
        sends_.push_back({chunk.shard, chunk.shards[static_cast<std::size_t>(rank())], other});
        receives_.push_back({place, theirs, other});
      } else if (place != chunk.shard && theirs.value > 0) {
        copy_async(stream, place, chunk.shard, theirs);
      }
    }
  }
  carry(Channel::verbs, sends_, receives_, stream);
}

void CheckedCommunicator::spread(void* data, Bytes bytes, int root, StreamRef stream) {
  sends_.clear();
  receives_.clear();
  for (int other = 0; other < size(); ++other) {
    if (rank() == root && other != root) sends_.push_back({data, bytes, other});
  }
  if (rank() != root) receives_.push_back({data, bytes, root});
  carry(Channel::verbs, sends_, receives_, stream);
}

void CheckedCommunicator::gather_small(Channel channel, std::span<const std::byte> mine, std::span<std::byte> all) {
  std::vector<Send> sends;
  std::vector<Receive> receives;
  const Bytes bytes{static_cast<std::int64_t>(mine.size())};
  for (int other = 0; other < size(); ++other) {
    std::byte* place = all.data() + static_cast<std::size_t>(other) * mine.size();
    if (other == rank()) {
      std::copy(mine.begin(), mine.end(), place);
    } else {
      sends.push_back({mine.data(), bytes, other});
      receives.push_back({place, bytes, other});
    }
  }
  carry(channel, sends, receives, {});
}

// ---- small exchanges
// -------------------------------------------------------------------------------------------------

std::vector<std::byte> CheckedCommunicator::gather_bytes(CommCall call, std::span<const std::byte> mine,
                                                         CommOrder order) {
  const Channel channel = channel_of(order);
  std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size()));
  guarded([&] {
    CallHeader header = begin(channel, CallKind::gather_bytes, call);
    header.agreed.add(static_cast<std::int64_t>(mine.size()));
    agree(channel, header, {}, {});
    gather_small(channel, mine, all);
    const auto moved = static_cast<std::int64_t>(all.size() - mine.size());
    count(moved, moved);
  });
  return all;
}

void CheckedCommunicator::barrier(CommCall call, CommOrder order) {
  guarded([&] { agree(channel_of(order), begin(channel_of(order), CallKind::barrier, call), {}, {}); });
}

}  // namespace spillway
