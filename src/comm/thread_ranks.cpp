// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "comm/checked_communicator.h"
#include "comm/host_sum.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// What a rank lays out for the others in a call.
struct Offer {
  std::span<const Send> sends;
  std::span<const ScatterChunk> chunks;
  std::span<const SumRun> runs;
};

// A place where all ranks of one order meet, any number of times.
struct Board {
  std::vector<std::int64_t> arrived;               // meetings, by rank
  std::vector<std::int64_t> gave_up;               // the last meeting at which a rank's patience ended, by rank
  std::array<std::vector<CallHeader>, 2> headers;  // from rank i to j at i * n + j; in turns
  std::vector<Offer> offers;
};

enum class RankState : unsigned char { active, ended };

// What the ranks share. All of it under one lock, but for what offers point to.
class World {
 public:
  explicit World(int size) : size_(size), states_(static_cast<std::size_t>(size)) {
    const auto n = static_cast<std::size_t>(size);
    for (Board& board : boards_) {
      board.arrived.resize(n);
      board.gave_up.resize(n);
      board.offers.resize(n);
      for (auto& headers : board.headers) headers.resize(n * n);
    }
  }

  int size() const { return size_; }
  std::mutex& mutex() { return mutex_; }
  Board& board(Channel channel) { return boards_[static_cast<std::size_t>(channel)]; }

  /// Blocks: until all ranks have come to this meeting, with `lock` given up. Returns the ranks that are missing after
  /// the timeout; then this rank has not come. Throws: RankError for a rank that will not come.
  std::vector<int> meet(std::unique_lock<std::mutex>& lock, Board& board, int rank, Seconds timeout) {
    const std::int64_t meeting = ++board.arrived[static_cast<std::size_t>(rank)];
    changed_.notify_all();
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout.value);
    while (true) {
      std::vector<int> missing = missing_at(board, meeting);
      if (missing.empty()) return missing;
      const std::string why = why_none_comes(missing);
      if (!why.empty() || std::chrono::steady_clock::now() >= until) {
        --board.arrived[static_cast<std::size_t>(rank)];  // who comes later must not read what this rank laid out
        if (!why.empty()) throw RankError(why);
        board.gave_up[static_cast<std::size_t>(rank)] = meeting;
        // Whoever gave up a moment ago had come: it waited for the others too.
        std::vector<int> others = missing;
        std::erase_if(others, [&](int other) { return board.gave_up[static_cast<std::size_t>(other)] == meeting; });
        return others.empty() ? missing : others;
      }
      changed_.wait_until(lock, std::chrono::time_point_cast<std::chrono::nanoseconds>(until));
    }
  }

  /// Blocks: until all have done with what this rank laid out. All of them were at the meeting before and wait for
  /// nothing in between, so none is missing, whatever has failed elsewhere.
  void part(std::unique_lock<std::mutex>& lock, Board& board, int rank) {
    const std::int64_t meeting = ++board.arrived[static_cast<std::size_t>(rank)];
    changed_.notify_all();
    changed_.wait(lock, [&] { return missing_at(board, meeting).empty(); });
  }

  void end(int rank) {
    const std::scoped_lock lock(mutex_);
    states_[static_cast<std::size_t>(rank)] = RankState::ended;
    changed_.notify_all();
  }
  void fail(int rank, const std::string& why) {
    const std::scoped_lock lock(mutex_);
    if (failure_.empty()) failure_ = fmt::format("rank {} failed: {}", rank, why);
    changed_.notify_all();
  }

 private:
  std::vector<int> missing_at(const Board& board, std::int64_t meeting) const {
    std::vector<int> missing;
    for (int other = 0; other < size_; ++other) {
      if (board.arrived[static_cast<std::size_t>(other)] < meeting) missing.push_back(other);
    }
    return missing;
  }
  std::string why_none_comes(const std::vector<int>& missing) const {
    if (!failure_.empty()) return failure_;
    for (const int other : missing) {
      if (states_[static_cast<std::size_t>(other)] == RankState::ended) {
        return fmt::format("rank {} has ended its part of the run, while others still make calls", other);
      }
    }
    return {};
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Board, kChannels> boards_;
  std::vector<RankState> states_;
  std::string failure_;  // the first
};

class ThreadRank final : public CheckedCommunicator {
 public:
  ThreadRank(std::shared_ptr<World> world, int rank, const CommOptions& options)
      : CheckedCommunicator({rank, world->size(), rank, world->size()}, options), world_(std::move(world)) {
    for (auto& next : next_) next.resize(static_cast<std::size_t>(size()));
  }
  ~ThreadRank() override {
    if (end_orderly()) world_->end(rank());
  }

  std::string_view transport() const override { return "threads"; }

 private:
  void swap(Channel channel, std::span<const CallHeader> out, std::span<CallHeader> in) override {
    const auto n = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
    Board& board = world_->board(channel);
    // In turns: a rank may write its next headers while another still reads these.
    std::vector<CallHeader>& headers = board.headers[static_cast<std::size_t>(current(channel).sequence % 2)];
    std::unique_lock lock(world_->mutex());
    std::copy(out.begin(), out.end(), headers.begin() + static_cast<std::ptrdiff_t>(self * n));
    meet(lock, channel);
    for (std::size_t other = 0; other < n; ++other) {
      if (other != self) in[other] = headers[other * n + self];
    }
  }

  void carry(Channel channel, std::span<const Send> sends, std::span<const Receive> receives, StreamRef) override {
    std::vector<std::size_t>& next = next_[static_cast<std::size_t>(channel)];
    std::fill(next.begin(), next.end(), 0);
    with_offers(channel, {sends, {}, {}}, [&](std::span<const Offer> offers) {
      for (const Receive& receive : receives) {
        if (receive.from == rank()) continue;
        const auto from = static_cast<std::size_t>(receive.from);
        const std::span<const Send> theirs = offers[from].sends;
        while (theirs[next[from]].to != rank()) ++next[from];
        const Send& send = theirs[next[from]++];
        if (send.size.value > 0) std::memcpy(receive.data, send.data, static_cast<std::size_t>(send.size.value));
      }
    });
  }

  void sum_scatter(std::span<const ScatterChunk> chunks, DType type, StreamRef) override {
    with_offers(Channel::verbs, {{}, chunks, {}}, [&](std::span<const Offer> offers) {
      std::vector<const void*> sources(offers.size());
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        std::int64_t before = 0;
        for (int other = 0; other < rank(); ++other) before += chunks[i].counts[static_cast<std::size_t>(other)];
        for (std::size_t r = 0; r < offers.size(); ++r) {
          sources[r] = static_cast<const std::byte*>(offers[r].chunks[i].whole) + before * size_of(type);
        }
        void* const target = chunks[i].shard;
        sum_values({&target, 1}, sources, type, chunks[i].counts[static_cast<std::size_t>(rank())]);
      }
    });
  }

  // Each rank sums its slice of every run, and gives it to all: no two touch the same bytes.
  void sum_all(std::span<const SumRun> runs, DType type, StreamRef) override {
    with_offers(Channel::verbs, {{}, {}, runs}, [&](std::span<const Offer> offers) {
      std::vector<void*> slices(offers.size());
      std::vector<const void*> sources(offers.size());
      for (std::size_t i = 0; i < runs.size(); ++i) {
        const std::int64_t begin = runs[i].count * rank() / size(), end = runs[i].count * (rank() + 1) / size();
        for (std::size_t r = 0; r < offers.size(); ++r) {
          slices[r] = static_cast<std::byte*>(offers[r].runs[i].data) + begin * size_of(type);
          sources[r] = slices[r];
        }
        sum_values(slices, sources, type, end - begin);
      }
    });
  }

  void announce_failure(const std::string& why) noexcept override {
    try {
      world_->fail(rank(), why);
    } catch (...) {  // no memory for the message: they will time out
    }
  }

  void meet(std::unique_lock<std::mutex>& lock, Channel channel) {
    const std::int64_t since = steady_ns();
    const std::vector<int> missing = world_->meet(lock, world_->board(channel), rank(), options().timeout);
    if (!missing.empty()) throw_timeout(channel, missing, since);
  }

  template <class Body>
  void with_offers(Channel channel, Offer mine, const Body& body) {
    Board& board = world_->board(channel);
    std::unique_lock lock(world_->mutex());
    board.offers[static_cast<std::size_t>(rank())] = mine;
    meet(lock, channel);
    lock.unlock();
    body(std::span<const Offer>(board.offers));
    lock.lock();
    world_->part(lock, board, rank());
  }

  const std::shared_ptr<World> world_;
  std::array<std::vector<std::size_t>, kChannels> next_;  // of each rank's sends
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int size, CommOptions options) {
  require(size >= 1, fmt::format("{} ranks were asked for; expected at least 1", size));
  const auto world = std::make_shared<World>(size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<ThreadRank>(world, rank, options));
  return ranks;
}

}  // namespace spillway
