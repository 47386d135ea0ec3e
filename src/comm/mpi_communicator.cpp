// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "comm/checked_communicator.h"
#include "comm/host_sum.h"
#include "comm/mpi_process.h"
#include "comm/patience.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"
#include "spillway/core/log.h"

namespace spillway {
namespace {

constexpr int kHeaderTag = 1, kDataTag = 2;

template <DType kType>
void add_halves(void* in, void* inout, int* count, MPI_Datatype*) {
  const std::array<const void*, 2> sources = {inout, in};
  sum_values({&inout, 1}, sources, kType, *count);
}

// How MPI sums a type.
struct Sum {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
};

class MpiCommunicator final : public CheckedCommunicator {
 public:
  MpiCommunicator(MpiProcess& process, Place place, const CommOptions& options)
      : CheckedCommunicator(place, options), process_(process) {
    require(options.largest_message.value > 0, "the largest message has no bytes");
    const std::scoped_lock lock(process_.mutex());
    for (MPI_Comm& comm : comms_) {
      check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "making a communicator");
      check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "asking for errors");
    }
    check_mpi(MPI_Op_create(add_halves<DType::bf16>, 1, &sum_bf16_), "making a sum of bf16");
    check_mpi(MPI_Op_create(add_halves<DType::f16>, 1, &sum_f16_), "making a sum of fp16");
  }
  ~MpiCommunicator() override {
    const bool orderly = end_orderly() && meet_at_end();
    if (orderly) {
      const std::scoped_lock lock(process_.mutex());
      for (MPI_Comm& comm : comms_) MPI_Comm_free(&comm);
      MPI_Op_free(&sum_bf16_);
      MPI_Op_free(&sum_f16_);
    }
    process_.closed(orderly);
  }

  std::string_view transport() const override { return "MPI"; }

 private:
  // What is under way in one channel: requests and the rank at the other end of each.
  struct Pending {
    std::vector<MPI_Request> requests;
    std::vector<int> ranks;
    std::vector<int> done;
    void clear() {
      requests.clear();
      ranks.clear();
    }
    MPI_Request* add(int rank) {
      ranks.push_back(rank);
      return &requests.emplace_back(MPI_REQUEST_NULL);
    }
  };

  MPI_Comm comm(Channel channel) const { return comms_[static_cast<std::size_t>(channel)]; }
  Pending& pending(Channel channel) { return pending_[static_cast<std::size_t>(channel)]; }

  void swap(Channel channel, std::span<const CallHeader> out, std::span<CallHeader> in) override {
    Pending& under_way = pending(channel);
    under_way.clear();
    {
      const std::scoped_lock lock(process_.mutex());
      // Receives first, so that entry i of the requests is the i-th other rank's header.
      for (int other = 0; other < size(); ++other) {
        if (other == rank()) continue;
        check_mpi(MPI_Irecv(&in[static_cast<std::size_t>(other)], sizeof(CallHeader), MPI_BYTE, other, kHeaderTag,
                            comm(channel), under_way.add(other)),
                  "receiving what another rank calls");
      }
      for (int other = 0; other < size(); ++other) {
        if (other == rank()) continue;
        check_mpi(MPI_Isend(&out[static_cast<std::size_t>(other)], sizeof(CallHeader), MPI_BYTE, other, kHeaderTag,
                            comm(channel), under_way.add(other)),
                  "telling another rank what is called");
      }
    }
    wait(channel, [&](std::size_t request) {
      if (request + 1 >= in.size()) return;  // a send
      const auto other = static_cast<std::size_t>(under_way.ranks[request]);
      require_agreement(out[other], in[other], channel);  // as early as it can be seen
    });
  }

  void carry(Channel channel, std::span<const Send> sends, std::span<const Receive> receives, StreamRef) override {
    pending(channel).clear();
    {
      const std::scoped_lock lock(process_.mutex());
      for (const Receive& receive : receives) {
        in_parts(channel, receive.from, receive.size, [&](std::int64_t at, int bytes, MPI_Request* request) {
          return MPI_Irecv(static_cast<std::byte*>(receive.data) + at, bytes, MPI_BYTE, receive.from, kDataTag,
                           comm(channel), request);
        });
      }
      for (const Send& send : sends) {
        in_parts(channel, send.to, send.size, [&](std::int64_t at, int bytes, MPI_Request* request) {
          return MPI_Isend(static_cast<const std::byte*>(send.data) + at, bytes, MPI_BYTE, send.to, kDataTag,
                           comm(channel), request);
        });
      }
    }
    wait(channel, [](std::size_t) {});
  }

  // MPI counts in int, so larger pieces go in parts, which both sides cut alike.
  template <class Start>
  void in_parts(Channel channel, int other, Bytes size, const Start& start) {
    if (other == rank()) return;
    const std::int64_t most = std::min(options().largest_message.value, std::int64_t{1} << 30);
    for (std::int64_t at = 0; at < size.value; at += most) {
      const int bytes = static_cast<int>(std::min(most, size.value - at));
      check_mpi(start(at, bytes, pending(channel).add(other)), "moving data");
    }
  }

  void sum_scatter(std::span<const ScatterChunk> chunks, DType type, StreamRef) override {
    Pending& under_way = pending(Channel::verbs);
    under_way.clear();
    counts_.clear();
    counts_.reserve(chunks.size() * static_cast<std::size_t>(size()));  // read until the sums are there
    {
      const std::scoped_lock lock(process_.mutex());
      for (const ScatterChunk& chunk : chunks) start_scatter(chunk, type);
    }
    wait(Channel::verbs, [](std::size_t) {});
  }

  void start_scatter(const ScatterChunk& chunk, DType type) {
    const Sum sum = sum_of(type);
    const std::int64_t most = most_elements(type);
    std::int64_t total = 0;
    for (const std::int64_t part : chunk.counts) total += part;
    if (total == 0) return;
    if (total <= most) {
      const std::size_t first = counts_.size();
      for (const std::int64_t part : chunk.counts) counts_.push_back(static_cast<int>(part));
      return check_mpi(MPI_Ireduce_scatter(chunk.whole, chunk.shard, &counts_[first], sum.type, sum.op,
                                           comm(Channel::verbs), pending(Channel::verbs).add(rank())),
                       "summing to shards");
    }
    const auto* from = static_cast<const std::byte*>(chunk.whole);
    for (int owner = 0; owner < size(); ++owner) {
      const std::int64_t part = chunk.counts[static_cast<std::size_t>(owner)];
      for (std::int64_t at = 0; at < part; at += most) {
        const std::int64_t n = std::min(most, part - at);
        auto* to = owner == rank() ? static_cast<std::byte*>(chunk.shard) + at * size_of(type) : nullptr;
        check_mpi(MPI_Ireduce(from, to, static_cast<int>(n), sum.type, sum.op, owner, comm(Channel::verbs),
                              pending(Channel::verbs).add(owner)),
                  "summing to shards");
        from += n * size_of(type);
      }
    }
  }

  void sum_all(std::span<const SumRun> runs, DType type, StreamRef) override {
    const Sum sum = sum_of(type);
    const std::int64_t most = most_elements(type);
    pending(Channel::verbs).clear();
    {
      const std::scoped_lock lock(process_.mutex());
      for (const SumRun& run : runs) {
        for (std::int64_t at = 0; at < run.count; at += most) {
          const int n = static_cast<int>(std::min(most, run.count - at));
          check_mpi(MPI_Iallreduce(MPI_IN_PLACE, static_cast<std::byte*>(run.data) + at * size_of(type), n, sum.type,
                                   sum.op, comm(Channel::verbs), pending(Channel::verbs).add(rank())),
                    "summing");
        }
      }
    }
    wait(Channel::verbs, [](std::size_t) {});
  }

  std::int64_t most_elements(DType type) const {
    return std::max<std::int64_t>(1, std::min(options().largest_message.value, std::int64_t{1} << 30) / size_of(type));
  }
  Sum sum_of(DType type) const {
    switch (type) {
      case DType::f32:
        return {MPI_FLOAT, MPI_SUM};
      case DType::i64:
        return {MPI_INT64_T, MPI_SUM};
      default:
        return {MPI_UINT16_T, type == DType::bf16 ? sum_bf16_ : sum_f16_};
    }
  }

  // Looks until all requests of the channel are done, and calls arrived(i) for each as it is. Never waits inside MPI,
  // which has no timeout and would keep the core.
  template <class Arrived>
  void wait(Channel channel, const Arrived& arrived) {
    Pending& under_way = pending(channel);
    std::vector<MPI_Request>& requests = under_way.requests;
    under_way.done.resize(requests.size());
    const std::int64_t since = steady_ns(), limit = static_cast<std::int64_t>(options().timeout.value * 1e9);
    std::size_t left = requests.size();
    Patience patience;
    while (left > 0) {
      int count = 0;
      {
        const std::scoped_lock lock(process_.mutex());
        check_mpi(MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, under_way.done.data(),
                               MPI_STATUSES_IGNORE),
                  "looking what has come");
      }
      for (int i = 0; i < count; ++i) arrived(static_cast<std::size_t>(under_way.done[static_cast<std::size_t>(i)]));
      left -= static_cast<std::size_t>(std::max(count, 0));
      if (count > 0 || left == 0) continue;
      throw_if_failed();
      if (steady_ns() - since > limit) throw_timeout(channel, missing(under_way), since);
      patience.pause();
    }
  }

  // Whose requests are open; for a sum, in which all take part, all others.
  std::vector<int> missing(const Pending& under_way) const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < under_way.requests.size(); ++i) {
      if (under_way.requests[i] != MPI_REQUEST_NULL) ranks.push_back(under_way.ranks[i]);
    }
    if (std::find(ranks.begin(), ranks.end(), rank()) != ranks.end()) {
      ranks.clear();
      for (int other = 0; other < size(); ++other) {
        if (other != rank()) ranks.push_back(other);
      }
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  // Small enough that MPI takes it without the other side: nobody is waited for. A rank in the middle of a call sees it
  // at its next one; if that never ends, the launcher ends it.
  void announce_failure(const std::string& why) noexcept override {
    CallHeader& header = farewell_;
    header.kind = CallKind::failed;
    header.rank = rank();
    set_text(header.note, why);
    const std::scoped_lock lock(process_.mutex());
    for (const MPI_Comm comm : comms_) {
      for (int other = 0; other < size(); ++other) {
        if (other == rank()) continue;
        MPI_Request request = MPI_REQUEST_NULL;
        if (MPI_Isend(&header, sizeof(header), MPI_BYTE, other, kHeaderTag, comm, &request) == MPI_SUCCESS)
          MPI_Request_free(&request);
      }
    }
  }

  // A rank that ends while another still calls is a disagreement too, which both learn here.
  bool meet_at_end() noexcept {
    try {
      for (const Channel channel : {Channel::verbs, Channel::host, Channel::lane}) agree_to_end(channel);
      return true;
    } catch (const std::exception& error) {
      fail(error.what());
      log({}, LogLevel::error, error.what());
      return false;
    }
  }

  MpiProcess& process_;
  std::array<MPI_Comm, kChannels> comms_{};
  std::array<Pending, kChannels> pending_;
  std::vector<int> counts_;
  MPI_Op sum_bf16_ = MPI_OP_NULL, sum_f16_ = MPI_OP_NULL;
  CallHeader farewell_;
};

CheckedCommunicator::Place place_in_world() {
  CheckedCommunicator::Place place;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "asking for the rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "asking for the ranks");
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, place.rank, MPI_INFO_NULL, &host),
            "finding the ranks of this host");
  check_mpi(MPI_Comm_rank(host, &place.local_rank), "asking for the rank on this host");
  check_mpi(MPI_Comm_size(host, &place.local_size), "asking for the ranks of this host");
  check_mpi(MPI_Comm_free(&host), "ending a communicator");
  return place;
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(const CommOptions& options) {
  MpiProcess& process = MpiProcess::get();
  CheckedCommunicator::Place place;
  {
    const std::scoped_lock lock(process.mutex());
    place = place_in_world();
  }
  auto communicator = std::make_unique<MpiCommunicator>(process, place, options);
  process.opened();
  return communicator;
}

std::string why_no_mpi() {
  return {};
}

}  // namespace spillway
