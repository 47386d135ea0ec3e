// SPDX-License-Identifier: Apache-2.0
//
// How ranks sum gradients in rank order: what each gives the others, and the group call that brings it to its owners.
#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "runtime/runtime_impl.h"

namespace spillway {
namespace {

// One chunk of a reduction, in addresses and elements.
struct ReduceItem {
  std::int64_t chunk = 0;
  std::vector<Shard> runs;  // what is reduced of the chunk: whole grains, neighbours joined
  const std::byte* staged = nullptr;
  std::byte* pieces = nullptr;  // of the other ranks, in rank order, `apart` bytes from each other
  std::byte* sum = nullptr;     // of what this rank owns
  std::byte* whole = nullptr;   // at stage 0: the sum of the whole chunk
};

// The grains of some segments of a chunk, as runs.
std::vector<Shard> runs_of(std::span<const Segment* const> segments) {
  std::vector<Shard> runs;
  for (const Segment* segment : segments) runs.push_back({segment->chunk_offset, segment->grains() * kGrainElements});
  std::sort(runs.begin(), runs.end(), [](const Shard& a, const Shard& b) { return a.begin < b.begin; });
  std::vector<Shard> joined;
  for (const Shard& run : runs) {
    if (!joined.empty() && joined.back().begin + joined.back().count == run.begin) {
      joined.back().count += run.count;
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

// What of the runs lies in a shard.
std::vector<Shard> common(const std::vector<Shard>& runs, const Shard& shard) {
  std::vector<Shard> out;
  for (const Shard& run : runs) {
    const std::int64_t begin = std::max(run.begin, shard.begin);
    const std::int64_t end = std::min(run.begin + run.count, shard.begin + shard.count);
    if (begin < end) out.push_back({begin, end - begin});
  }
  return out;
}

class ReduceBody {
 public:
  ReduceBody(Machine& machine, const Layout& layout, const StateSpec& spec, std::vector<ReduceItem> items)
      : machine_(machine),
        layout_(layout),
        piece_(spec.piece_type()),
        transport_sums_(spec.transport_sums),
        size_(size_of(piece_)),
        apart_(layout.most_owned_elements() * size_),
        items_(std::move(items)) {}

  void operator()(StreamRef stream) const {
    if (transport_sums_) {
      sum_in_transport(stream);
    } else {
      send_to_owners(stream);
      for (const ReduceItem& item : items_) add_in_rank_order(item, stream);
    }
    if (layout_.partition().stage == 0) give_sums(stream);
  }

  /// Bytes that this rank sends.
  std::int64_t wire_bytes() const {
    std::int64_t bytes = 0;
    for (const ReduceItem& item : items_) {
      for (int rank = 0; rank < ranks(); ++rank) {
        const std::int64_t to_each = rank == me() && layout_.partition().stage == 0 ? 4 * (ranks() - 1) : 0;
        for (const Shard& run : common(item.runs, layout_.shard(item.chunk, rank)))
          bytes += run.count * (rank == me() ? to_each : size_);
      }
    }
    return bytes;
  }

 private:
  int me() const { return layout_.partition().rank; }
  int ranks() const { return layout_.partition().ranks; }
  // Where another rank's value of an element of the own shard lies.
  std::byte* piece(const ReduceItem& item, int rank, std::int64_t element) const {
    return item.pieces + apart_ * (rank < me() ? rank : rank - 1) +
           (element - layout_.shard(item.chunk, me()).begin) * size_;
  }

  void send_to_owners(StreamRef stream) const {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (const ReduceItem& item : items_) {
      const std::vector<Shard> own = common(item.runs, layout_.shard(item.chunk, me()));
      for (int rank = 0; rank < ranks(); ++rank) {
        if (rank == me()) continue;
        for (const Shard& run : common(item.runs, layout_.shard(item.chunk, rank)))
          sends.push_back({item.staged + run.begin * size_, {run.count * size_}, rank});
        for (const Shard& run : own) receives.push_back({piece(item, rank, run.begin), {run.count * size_}, rank});
      }
    }
    machine_.communicator()->exchange({"reduce gradients", items_.front().chunk}, sends, receives, stream);
  }

  void add_in_rank_order(const ReduceItem& item, StreamRef stream) const {
    const DeviceWork& work = machine_.device_work();
    const Shard own = layout_.shard(item.chunk, me());
    for (const Shard& run : common(item.runs, own)) {
      std::byte* const sum = item.sum + (run.begin - own.begin) * 4;
      for (int rank = 0; rank < ranks(); ++rank) {
        const std::byte* part = rank == me() ? item.staged + run.begin * size_ : piece(item, rank, run.begin);
        add_gradient(work, stream, sum, DType::f32, part, piece_, run.count, /*first=*/rank == 0);
      }
    }
  }

  // The same owners get the transport's sums, in the type of pieces, where other ranks' pieces would stand.
  void sum_in_transport(StreamRef stream) const {
    std::deque<std::vector<std::int64_t>> counts;
    std::vector<ScatterChunk> chunks;
    for (const ReduceItem& item : items_) {
      const std::int64_t own = layout_.shard(item.chunk, me()).begin;
      for (const Shard& run : item.runs) {
        std::vector<std::int64_t>& of_run = counts.emplace_back();
        std::byte* target = item.pieces;  // a rank without a part of the run gets nothing there
        for (int rank = 0; rank < ranks(); ++rank) {
          const std::vector<Shard> part = common({run}, layout_.shard(item.chunk, rank));
          of_run.push_back(part.empty() ? 0 : part.front().count);
          if (rank == me() && !part.empty()) target += (part.front().begin - own) * size_;
        }
        chunks.push_back({item.staged + run.begin * size_, target, of_run});
      }
    }
    machine_.communicator()->reduce_scatter({"sum gradients", items_.front().chunk}, chunks, piece_, stream);
    const DeviceWork& work = machine_.device_work();
    for (const ReduceItem& item : items_) {
      const Shard own = layout_.shard(item.chunk, me());
      for (const Shard& run : common(item.runs, own)) {
        std::byte* const sum = item.sum + (run.begin - own.begin) * 4;
        const std::byte* const from = item.pieces + (run.begin - own.begin) * size_;
        add_gradient(work, stream, sum, DType::f32, from, piece_, run.count, /*first=*/true);
      }
    }
  }

  // Every owner's sums to everyone.
  void give_sums(StreamRef stream) const {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (const ReduceItem& item : items_) {
      const std::vector<Shard> own = common(item.runs, layout_.shard(item.chunk, me()));
      for (int rank = 0; rank < ranks(); ++rank) {
        if (rank == me()) continue;
        for (const Shard& run : own) sends.push_back({item.whole + run.begin * 4, {run.count * 4}, rank});
        for (const Shard& run : common(item.runs, layout_.shard(item.chunk, rank)))
          receives.push_back({item.whole + run.begin * 4, {run.count * 4}, rank});
      }
    }
    machine_.communicator()->exchange({"share gradients", items_.front().chunk}, sends, receives, stream);
  }

  Machine& machine_;
  const Layout& layout_;
  const DType piece_;
  const bool transport_sums_;
  const std::int64_t size_, apart_;
  const std::vector<ReduceItem> items_;
};

}  // namespace

Ticket Runtime::stage_zeros(std::span<const Segment* const> segments, Slot& slot, Ticket before) {
  const std::int64_t size = size_of(spec_.working);
  auto body = [&work = machine_.device_work(), size, to = slot.view.data,
               list = std::vector<const Segment*>(segments.begin(), segments.end())](StreamRef stream) {
    for (const Segment* segment : list) {
      work.zero(stream, to + segment->chunk_offset * size, {segment->count * size});
    }
  };
  return machine_.compute().submit({"stage zeros",
                                    segments.front()->chunk,
                                    OpKind::elementwise,
                                    static_cast<double>(elements(segments) * size),
                                    {slot.free, std::move(before)},
                                    std::move(body)});
}

Ticket Runtime::reduce(std::span<const Reduction> chunks) {
  const Partition& partition = layout_.partition();
  std::vector<ReduceItem> items;
  std::vector<Ticket> after;
  for (const Reduction& chunk : chunks) {
    const bool whole = partition.stage == 0;
    std::byte* const sum = chunk.sum->view.data;
    const std::int64_t own = layout_.shard(chunk.chunk, partition.rank).begin;
    items.push_back({chunk.chunk, runs_of(chunk.segments), chunk.staged->view.data, chunk.sum->pieces.data,
                     at_element(sum, whole ? own * 4 : 0), whole ? sum : nullptr});
    after.push_back(chunk.ready);
    after.push_back(chunk.sum->free);
  }
  ReduceBody body(machine_, layout_, spec_, std::move(items));
  const auto bytes = static_cast<double>(body.wire_bytes());
  const Ticket done = machine_.network().submit(
      {"reduce gradients", chunks.front().chunk, OpKind::copy, bytes, std::move(after), std::move(body)});
  for (const Reduction& chunk : chunks) chunk.staged->free = chunk.sum->free = done;
  if (spec_.reduce_last) {
    // What was sent may have been read from where the next step's gradients are accumulated.
    for (const Reduction& chunk : chunks) gradient_ops_[static_cast<std::size_t>(chunk.chunk)] = done;
  }
  return done;
}

Runtime::Offer Runtime::offer(std::span<const Segment* const> segments) {
  const std::int64_t chunk = segments.front()->chunk;
  const std::int64_t size = size_of(spec_.piece_type());
  std::byte* const own = store_->own_gradient(chunk).data;
  Ticket& newest = gradient_ops_[static_cast<std::size_t>(chunk)];
  const Tier tier = store_->placement(chunk).gradient;
  std::vector<const Segment*> missing;
  for (const Segment* segment : segments) {
    const auto index = static_cast<std::size_t>(segment - layout_.segments().data());
    if (!own_[index]) missing.push_back(segment);
    own_[index] = true;
  }
  if (!missing.empty()) {
    auto zero = [&work = workplace(machine_, tier).work, size, own, missing](StreamRef stream) {
      for (const Segment* segment : missing)
        work.zero(stream, own + segment->chunk_offset * size, {segment->count * size});
    };
    newest = lane_of(tier).submit({"zeros of a rank",
                                   chunk,
                                   OpKind::elementwise,
                                   static_cast<double>(elements(missing) * size),
                                   {newest},
                                   std::move(zero)});
  }
  if (on_device(tier)) return {&own_on_device_[static_cast<std::size_t>(chunk)], newest};
  Slot& slot = piece_slots_.next();
  auto body = [&work = machine_.device_work(), size, own, to = slot.view.data,
               list = std::vector<const Segment*>(segments.begin(), segments.end())](StreamRef stream) {
    for (const Segment* segment : list) {
      const std::int64_t offset = segment->chunk_offset * size;
      work.copy(stream, to + offset, own + offset, {segment->count * size});
    }
  };
  newest = machine_.upload().submit({"gradients up",
                                     chunk,
                                     OpKind::copy,
                                     static_cast<double>(elements(segments) * size),
                                     {newest, slot.free},
                                     std::move(body)});
  return {&slot, newest};
}

std::vector<std::int64_t> Runtime::with_earlier_gradients(std::vector<std::int64_t> order) const {
  std::vector<bool> listed(parameters_.size());
  for (const std::int64_t parameter : order) listed[static_cast<std::size_t>(parameter)] = true;
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].has_gradient && !listed[p]) order.push_back(static_cast<std::int64_t>(p));
  }
  return order;
}

}  // namespace spillway
