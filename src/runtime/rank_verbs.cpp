// SPDX-License-Identifier: Apache-2.0
//
// What ranks do together beside summing gradients: bring updated parameters together, agree on what is to be done.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/runtime_impl.h"

namespace spillway {

std::vector<Bytes> shard_bytes(const Layout& layout, std::int64_t chunk, std::int64_t size) {
  std::vector<Bytes> out;
  for (int rank = 0; rank < layout.partition().ranks; ++rank) out.push_back({layout.shard(chunk, rank).count * size});
  return out;
}

// ---- gradients -----------------------------------------------------------------------------------------------------

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
                                      static_cast<double>(elements(kept) * bytes_of_sum(Sums::step)),
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
