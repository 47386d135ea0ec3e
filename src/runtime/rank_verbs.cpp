// SPDX-License-Identifier: Apache-2.0
//
// What ranks do together: sum gradients in rank order, bring updated parameters together, agree on what is to be done.
#include <algorithm>
#include <cstring>
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
        working_(spec.working),
        transport_sums_(spec.transport_sums),
        size_(size_of(working_)),
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
        add_gradient(work, stream, sum, DType::f32, part, working_, run.count, /*first=*/rank == 0);
      }
    }
  }

  // The same owners get the transport's sums, in the working type, where other ranks' pieces would stand.
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
    machine_.communicator()->reduce_scatter({"sum gradients", items_.front().chunk}, chunks, working_, stream);
    const DeviceWork& work = machine_.device_work();
    for (const ReduceItem& item : items_) {
      const Shard own = layout_.shard(item.chunk, me());
      for (const Shard& run : common(item.runs, own)) {
        std::byte* const sum = item.sum + (run.begin - own.begin) * 4;
        const std::byte* const from = item.pieces + (run.begin - own.begin) * size_;
        add_gradient(work, stream, sum, DType::f32, from, working_, run.count, /*first=*/true);
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
  const DType working_;
  const bool transport_sums_;
  const std::int64_t size_, apart_;
  const std::vector<ReduceItem> items_;
};

}  // namespace

std::vector<Bytes> shard_bytes(const Layout& layout, std::int64_t chunk, std::int64_t size) {
  std::vector<Bytes> out;
  for (int rank = 0; rank < layout.partition().ranks; ++rank) out.push_back({layout.shard(chunk, rank).count * size});
  return out;
}

// ---- gradients -----------------------------------------------------------------------------------------------------

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
  return done;
}

std::vector<const Segment*> Runtime::kept_of(std::span<const Segment* const> segments) const {
  std::vector<const Segment*> out;
  for (const Segment* segment : segments) {
    // A chunk has one segment of a parameter at most.
    for (const Segment& kept : layout_.kept_segments_of_parameter(segment->parameter)) {
      if (kept.chunk == segment->chunk) out.push_back(&kept);
    }
  }
  return out;
}

Ticket Runtime::accumulate_sum(std::span<const Segment* const> kept, Slot& sum, Ticket reduced) {
  struct Item {
    const Segment* segment;
    bool first;
  };
  const std::int64_t chunk = kept.front()->chunk;
  std::vector<Item> items;
  for (const Segment* segment : kept) items.push_back({segment, note_gradient(*segment)});
  auto body = [&work = machine_.device_work(), type = spec_.gradient, items = std::move(items), from = sum.view.data,
               to = store_->gradient(chunk).data](StreamRef stream) {
    for (const Item& item : items) {
      const std::int64_t at = item.segment->chunk_offset;
      add_gradient(work, stream, to + at * size_of(type), type, from + at * 4, DType::f32, item.segment->count,
                   item.first);
    }
  };
  Ticket& newest = gradient_ops_[static_cast<std::size_t>(chunk)];
  newest = machine_.network().submit({"accumulate",
                                      chunk,
                                      OpKind::elementwise,
                                      static_cast<double>(elements(kept) * bytes_of_sum()),
                                      {std::move(reduced), newest},
                                      std::move(body)});
  return sum.free = newest;
}

kernels::ExactSum sum_of_ranks(Machine& machine, const kernels::ExactSum& mine) {
  kernels::ExactSum total;
  if (machine.communicator() == nullptr) return mine;
  for (const kernels::ExactSum& sum : machine.communicator()->gather_all({"gradient norm"}, mine)) total.add(sum);
  return total;
}

void Runtime::wait_agree_gradients() {
  Communicator* const ranks = machine_.communicator();
  if (!layout_.partition().shared() || ranks == nullptr) return;
  const std::size_t count = parameters_.size();
  std::vector<std::byte> mine((count + 7) / 8);
  for (std::size_t p = 0; p < count; ++p) {
    if (parameters_[p].has_gradient) mine[p / 8] |= std::byte{1} << (p % 8);
  }
  const std::vector<std::byte> all = ranks->gather_bytes({"gradients of this step"}, mine);
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks->size()); ++r) {
    for (std::size_t p = 0; p < count; ++p) {
      const bool there = (all[r * mine.size() + p / 8] >> (p % 8) & std::byte{1}) != std::byte{0};
      parameters_[p].has_gradient = parameters_[p].has_gradient || there;
    }
  }
}

// ---- parameters ----------------------------------------------------------------------------------------------------

void Runtime::gather(std::span<const std::int64_t> chunks, std::vector<Ticket> after) {
  if (!layout_.partition().cuts()) return;
  struct Item {
    std::vector<Bytes> sizes;
    const std::byte* shard;
    std::byte* whole;
  };
  const std::int64_t size = size_of(spec_.working);
  std::vector<Item> items;
  std::int64_t bytes = 0;
  for (std::int64_t chunk : chunks) {
    std::byte* const whole = store_->working(chunk).data;
    items.push_back({shard_bytes(layout_, chunk, size), at_element(whole, kept_begin(chunk) * size), whole});
    bytes += layout_.kept(chunk).count * size * (layout_.partition().ranks - 1);
  }
  after.push_back(machine_.compute().mark("before gather", chunks.front(), 0));  // may still read the old values
  auto body = [&machine = machine_, first = chunks.front(), items = std::move(items)](StreamRef stream) {
    std::vector<GatherChunk> list;
    for (const Item& item : items) list.push_back({item.shard, item.whole, item.sizes});
    machine.communicator()->all_gather({"gather parameters", first}, list, stream);
  };
  const Ticket done = machine_.network().submit({"gather parameters", chunks.front(), OpKind::copy,
                                                 static_cast<double>(bytes), std::move(after), std::move(body)});
  for (std::int64_t chunk : chunks) uploads_[static_cast<std::size_t>(chunk)] = done;
}

void Runtime::gather_values(std::int64_t parameter, float* values) {
  Communicator* const ranks = machine_.communicator();
  if (ranks == nullptr) return;
  // All ranks give as many values: as many as the one that keeps most. In pieces, since stores take no large ones.
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const auto count = static_cast<std::size_t>(ranks->size());
  std::vector<std::vector<float>> parts(count);
  std::vector<std::vector<Segment>> owned;
  std::size_t most = 0;
  for (std::size_t rank = 0; rank < count; ++rank) {
    std::size_t numel = 0;
    owned.push_back(layout_.owned_segments_of_parameter(parameter, static_cast<int>(rank)));
    for (const Segment& segment : owned.back()) numel += static_cast<std::size_t>(segment.count);
    most = std::max(most, numel);
  }
  for (std::vector<float>& part : parts) part.resize(most);
  std::vector<float>& mine = parts[static_cast<std::size_t>(ranks->rank())];
  float* next = mine.data();
  for (const Segment& segment : owned[static_cast<std::size_t>(ranks->rank())]) {
    next = std::copy_n(values + segment.parameter_offset, segment.count, next);
  }
  for (std::size_t at = 0; at < most; at += kPiece) {
    const std::size_t length = std::min(kPiece, most - at);
    const std::vector<std::byte> all =
        ranks->gather_bytes({"state", parameter}, std::as_bytes(std::span(mine).subspan(at, length)));
    for (std::size_t rank = 0; rank < count; ++rank)
      std::memcpy(parts[rank].data() + at, all.data() + rank * length * sizeof(float), length * sizeof(float));
  }
  for (std::size_t rank = 0; rank < count; ++rank) {
    const float* from = parts[rank].data();
    for (const Segment& segment : owned[rank]) {
      std::copy_n(from, segment.count, values + segment.parameter_offset);
      from += segment.count;
    }
  }
}

void Runtime::wait_gather_working() {
  wait_all();
  const std::int64_t size = size_of(spec_.working);
  std::vector<float> values;
  for (const Segment& segment : layout_.kept_segments()) {
    const View& master = store_->master(segment.chunk);
    if (master_is_working(segment.chunk) || master.data == nullptr) continue;
    values.resize(static_cast<std::size_t>(segment.count));
    wait_read(values.data(), master.slice({segment.chunk_offset * 4}, {segment.count * 4}));
    const std::int64_t at = kept_begin(segment.chunk) + segment.chunk_offset;
    wait_write_rounded(store_->working(segment.chunk).slice({at * size}, {segment.count * size}), spec_.working,
                       values.data());
  }
  for (std::int64_t chunk = 0; chunk < static_cast<std::int64_t>(layout_.chunks().size()); ++chunk) {
    gather(std::span(&chunk, 1), {});
  }
  wait_all();
}

}  // namespace spillway
