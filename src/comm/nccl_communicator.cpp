// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/nccl_library.h"
#include "comm/patience.h"
#include "comm/store_communicator.h"
#include "device/cuda_api.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// How often the watch looks for faults that NCCL found by itself, and for work that does not end.
constexpr auto kWatch = std::chrono::milliseconds(200);

cudaStream_t native(StreamRef stream) {
  return static_cast<cudaStream_t>(stream.native());
}

ncclDataType_t type_of(DType type) {
  switch (type) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    default:
      return ncclInt64;
  }
}

std::size_t unsigned_size(std::int64_t size) {
  return static_cast<std::size_t>(size);
}

template <class T>
bool all_same(std::span<const T> values) {
  return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
}

class NcclCommunicator final : public StoreCommunicator {
 public:
  NcclCommunicator(Place place, Store& store, std::string prefix, int ordinal, const CommOptions& options)
      : StoreCommunicator(place, store, std::move(prefix), options), nccl_(NcclLibrary::get()), ordinal_(ordinal) {
    const cuda::DeviceGuard guard(ordinal);
    ncclUniqueId id{};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // so that nothing here waits without a timeout
    try {
      if (rank() == 0) check_nccl(nccl_.get_unique_id(&id), "making an id");
      const std::vector<std::byte> shared = share("NCCL id", std::as_bytes(std::span(&id, 1)));
      std::memcpy(&id, shared.data(), std::min(shared.size(), sizeof(id)));
      check_nccl(nccl_.init(&comm_, size(), id, rank(), &config), "starting");
      std::unique_lock lock(mutex_);
      settle("starting", lock);
    } catch (const std::exception& error) {
      fail(error.what());  // the others wait in NCCL for this rank
      if (comm_ != nullptr) nccl_.abort(comm_);
      throw;
    }
    starting_ = false;
    watch_ = std::thread([this] { watch(); });
  }
  ~NcclCommunicator() override {
    {
      const std::scoped_lock lock(mutex_);
      leaving_ = true;
    }
    const bool orderly = end_together();
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    changed_.notify_one();
    watch_.join();
    if (orderly && !aborted_ && !failed() && nccl_.finalize(comm_) != ncclSuccess) settle_quietly();
    if (!aborted_) {  // after a failure NCCL has work left for which destroying it would wait
      static_cast<void>(orderly && !failed() ? nccl_.destroy(comm_) : nccl_.abort(comm_));
    }
    for (const cudaEvent_t event : idle_) cudaEventDestroy(event);
    for (const Issued& issued : issued_) cudaEventDestroy(issued.event);
  }

  std::string_view transport() const override { return "NCCL"; }
  bool uses_stream() const override { return true; }

 private:
  struct Issued {
    cudaEvent_t event = nullptr;
    CallHeader call;
    std::int64_t since = 0;
  };

  void carry(Channel channel, std::span<const Send> sends, std::span<const Receive> receives,
             StreamRef stream) override {
    check(channel == Channel::verbs, "small exchanges go through the store");
    group("moving pieces", stream, [&] {
      for (const Send& send : sends) {
        if (send.to != rank() && send.size.value > 0)
          give(nccl_.send(send.data, unsigned_size(send.size.value), ncclInt8, send.to, comm_, native(stream)));
      }
      for (const Receive& receive : receives) {
        if (receive.from != rank() && receive.size.value > 0) {
          give(nccl_.receive(receive.data, unsigned_size(receive.size.value), ncclInt8, receive.from, comm_,
                             native(stream)));
        }
      }
    });
  }

  void gather(std::span<const GatherChunk> chunks, StreamRef stream) override {
    group("gathering", stream, [&] {
      for (const GatherChunk& chunk : chunks) gather_chunk(chunk, native(stream));
    });
  }
  // NCCL gathers equal shards alone; others are a broadcast from each owner, in the same group.
  void gather_chunk(const GatherChunk& chunk, cudaStream_t stream) {
    if (all_same(chunk.shards)) {
      return give(
          nccl_.all_gather(chunk.shard, chunk.whole, unsigned_size(chunk.shards[0].value), ncclInt8, comm_, stream));
    }
    auto* place = static_cast<std::byte*>(chunk.whole);
    for (int owner = 0; owner < size(); ++owner) {
      const std::size_t bytes = unsigned_size(chunk.shards[unsigned_size(owner)].value);
      const void* from = owner == rank() ? chunk.shard : place;
      if (bytes > 0) give(nccl_.broadcast(from, place, bytes, ncclInt8, owner, comm_, stream));
      place += bytes;
    }
  }

  void sum_scatter(std::span<const ScatterChunk> chunks, DType type, StreamRef stream) override {
    group("summing to shards", stream, [&] {
      for (const ScatterChunk& chunk : chunks) scatter_chunk(chunk, type, native(stream));
    });
  }
  void scatter_chunk(const ScatterChunk& chunk, DType type, cudaStream_t stream) {
    if (all_same(chunk.counts)) {
      return give(nccl_.reduce_scatter(chunk.whole, chunk.shard, unsigned_size(chunk.counts[0]), type_of(type), ncclSum,
                                       comm_, stream));
    }
    const auto* place = static_cast<const std::byte*>(chunk.whole);
    for (int owner = 0; owner < size(); ++owner) {
      const std::int64_t count = chunk.counts[unsigned_size(owner)];
      if (count > 0) {
        give(nccl_.reduce(place, owner == rank() ? chunk.shard : nullptr, unsigned_size(count), type_of(type), ncclSum,
                          owner, comm_, stream));
      }
      place += count * size_of(type);
    }
  }

  void sum_all(std::span<const SumRun> runs, DType type, StreamRef stream) override {
    group("summing", stream, [&] {
      for (const SumRun& run : runs) {
        if (run.count > 0)
          give(nccl_.all_reduce(run.data, run.data, unsigned_size(run.count), type_of(type), ncclSum, comm_,
                                native(stream)));
      }
    });
  }

  void spread(void* data, Bytes bytes, int root, StreamRef stream) override {
    group("broadcasting", stream, [&] {
      if (bytes.value > 0)
        give(nccl_.broadcast(data, data, unsigned_size(bytes.value), ncclInt8, root, comm_, native(stream)));
    });
  }

  // Ends a group that was begun, also where adding to it failed: NCCL would take all later calls for parts of it.
  class Group {
   public:
    explicit Group(const NcclLibrary& nccl) : nccl_(nccl) {}
    ~Group() {
      if (open_) nccl_.group_end();
    }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ncclResult_t end() {
      open_ = false;
      return nccl_.group_end();
    }

   private:
    const NcclLibrary& nccl_;
    bool open_ = true;
  };

  // One group of calls on a stream, with an event behind it that the watch looks at.
  template <class Body>
  void group(const char* what, StreamRef stream, const Body& body) {
    require(stream != StreamRef(), "ranks with GPUs give their calls to a stream, and none was passed");
    std::unique_lock lock(mutex_);
    require_unbroken();
    check_nccl(nccl_.group_start(), what);
    Group open(nccl_);
    body();
    check_nccl(open.end(), what);
    settle(what, lock);
    Issued issued{take_event(), current(Channel::verbs), steady_ns()};
    cuda::check_code(cudaEventRecord(issued.event, native(stream)), "recording an event");
    issued_.push_back(issued);
  }
  void give(ncclResult_t code) const { check_nccl(code, "adding to a group"); }

  cudaEvent_t take_event() {
    retire();
    cudaEvent_t event = nullptr;
    if (idle_.empty()) {
      cuda::check_code(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    } else {
      event = idle_.back();
      idle_.pop_back();
    }
    return event;
  }
  // Calls that are through give their events back.
  void retire() {
    while (!issued_.empty() && cudaEventQuery(issued_.front().event) == cudaSuccess) {
      idle_.push_back(issued_.front().event);
      issued_.pop_front();
    }
    cudaGetLastError();  // "not ready" must not be reported by the next launch
  }

  // Until NCCL has taken what it was given, without waiting inside it, or until this rank has failed. Between looks
  // the lock is open to the watch, which may break off what is waited for.
  void settle(const char* what, std::unique_lock<std::mutex>& lock) {
    const std::int64_t since = steady_ns(), limit = static_cast<std::int64_t>(options().timeout.value * 1e9);
    constexpr std::int64_t kLook = std::chrono::nanoseconds(kWatch).count();
    std::int64_t looked = since;
    Patience patience;
    while (true) {
      if (starting_ && steady_ns() - looked > kLook) {  // as long as NCCL starts, nobody else looks
        looked = steady_ns();
        if (const std::string why = failure_elsewhere(); !why.empty()) throw RankError(why);
      }
      require_unbroken();
      if (failed())
        throw RankError(
            fmt::format("rank {} of {} waits for NCCL at {} no longer: it has failed", rank(), size(), what));
      ncclResult_t state = ncclSuccess;
      check_nccl(nccl_.async_error(comm_, &state), what);
      if (state == ncclSuccess) return;
      check_nccl(state, what);
      if (steady_ns() - since > limit)
        throw RankError(fmt::format("rank {} of {} has waited {} s for NCCL at {}: another rank does not come to it",
                                    rank(), size(), options().timeout.value, what));
      lock.unlock();
      patience.pause();
      lock.lock();
    }
  }
  void settle_quietly() noexcept {
    try {
      std::unique_lock lock(mutex_);
      settle("ending", lock);
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }

  // "In progress" is how a call that does not wait says that it was taken.
  void check_nccl(ncclResult_t code, const char* what) const {
    if (code == ncclSuccess || code == ncclInProgress) return;
    throw RankError(fmt::format("NCCL failed at {} on rank {}: {} ({})", what, rank(), nccl_.error_string(code),
                                nccl_.last_error(comm_)));
  }
  void require_unbroken() const {
    if (!broken_.empty()) throw RankError("NCCL's work was broken off: " + broken_);
  }

  // Ends the work on the device that waits for ranks which will not come; their streams go on.
  void watch() {
    cudaSetDevice(ordinal_);
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, kWatch, [&] { return ending_; })) {
      if (aborted_) continue;
      std::string why = why_broken();
      if (why.empty() && !leaving_) {
        lock.unlock();  // a store may take its time
        why = failure_elsewhere();
        lock.lock();
        if (leaving_) why.clear();  // end_together() looks for itself, and the store goes when it is through
      }
      if (why.empty()) continue;
      broken_ = why;
      lock.unlock();
      fail(why);  // before NCCL breaks off: who waited for it finds the reason
      lock.lock();
      aborted_ = true;
      nccl_.abort(comm_);
    }
  }
  std::string failure_elsewhere() {
    try {
      return announced_failure();
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  std::string why_broken() {
    ncclResult_t state = ncclSuccess;
    nccl_.async_error(comm_, &state);
    if (state != ncclSuccess && state != ncclInProgress)
      return fmt::format("NCCL reports on rank {}: {} ({})", rank(), nccl_.error_string(state),
                         nccl_.last_error(comm_));
    retire();
    if (!failed() && (issued_.empty() || steady_ns() - issued_.front().since < options().timeout.value * 1e9))
      return {};
    if (failed()) return "this rank failed";
    return fmt::format("rank {} of {} has waited {} s for the others in {}", rank(), size(), options().timeout.value,
                       describe(issued_.front().call, Channel::verbs));
  }

  const NcclLibrary& nccl_;
  const int ordinal_;
  ncclComm_t comm_ = nullptr;
  std::mutex mutex_;  // of all below, and of calls of NCCL
  std::condition_variable changed_;
  std::deque<Issued> issued_;
  std::vector<cudaEvent_t> idle_;
  std::string broken_;
  bool starting_ = true, leaving_ = false, ending_ = false, aborted_ = false;
  std::thread watch_;
};

}  // namespace

std::string why_no_nccl() {
  try {
    static_cast<void>(NcclLibrary::get());
    return {};
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

std::unique_ptr<Communicator> make_nccl_communicator(const Launch& launch, Store& store, int ordinal,
                                                     const CommOptions& options) {
  static_cast<void>(find_gpu(ordinal));
  return std::make_unique<NcclCommunicator>(
      CheckedCommunicator::Place{launch.rank, launch.size, launch.local_rank, launch.local_size}, store,
      next_prefix(store, launch), ordinal, options);
}

}  // namespace spillway
