// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;  // leaves room for bytes and sums in 63 bits

std::int64_t round_up_to_grain(std::int64_t elements) {
  return (elements + kGrainElements - 1) / kGrainElements * kGrainElements;
}

}  // namespace

std::int64_t ParameterInfo::numel() const {
  std::int64_t count = 1;
  for (std::int64_t size : shape) {
    require(size >= 0, fmt::format("parameter {} has a negative size", name));
    if (size != 0) {
      require(count <= kMaxElements / size, fmt::format("parameter {} has more than 2^56 elements", name));
    }
    count *= size;
  }
  return count;
}

Layout::Layout(std::vector<ParameterInfo> parameters, std::int64_t chunk_elements, Partition partition)
    : parameters_(std::move(parameters)), partition_(partition) {
  require(partition.ranks >= 1 && partition.rank >= 0 && partition.rank < partition.ranks,
          fmt::format("rank {} of {} was asked for", partition.rank, partition.ranks));
  require(partition.stage >= 0 && partition.stage <= 2,
          fmt::format("stage {} was asked for; expected 0 (nothing is cut), 1 (optimizer states) or 2 (gradients too)",
                      partition.stage));
  require(chunk_elements >= 1 && chunk_elements <= kMaxElements,
          fmt::format("a chunk of {} elements was asked for; expected 1 to 2^56", chunk_elements));
  chunk_elements_ = round_up_to_grain(chunk_elements);
  for (const ParameterInfo& parameter : parameters_) {
    offsets_.push_back(padded_);
    padded_ += round_up_to_grain(parameter.numel());
    require(padded_ <= kMaxElements, "the parameters together have more than 2^56 elements");
  }
  for (std::int64_t begin = 0; begin < padded_; begin += chunk_elements_) {
    chunks_.push_back({begin, std::min(chunk_elements_, padded_ - begin), 0, 0});
  }
  cut_segments();
  if (partition_.cuts()) cut_kept();
}

void Layout::cut_segments() {
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    first_of_parameter_.push_back(static_cast<std::int64_t>(segments_.size()));
    const std::int64_t numel = parameters_[p].numel();
    for (std::int64_t done = 0; done < numel;) {
      const std::int64_t at = offsets_[p] + done;
      const std::int64_t chunk = at / chunk_elements_;
      Chunk& owner = chunks_[static_cast<std::size_t>(chunk)];
      const std::int64_t count = std::min(numel - done, owner.begin + owner.count - at);
      if (owner.segment_count == 0) owner.first_segment = static_cast<std::int64_t>(segments_.size());
      ++owner.segment_count;
      segments_.push_back({static_cast<std::int64_t>(p), chunk, at - owner.begin, done, count});
      done += count;
    }
  }
  first_of_parameter_.push_back(static_cast<std::int64_t>(segments_.size()));
}

std::span<const Segment> Layout::chunk_segments(std::int64_t chunk) const {
  const Chunk& c = chunks_[static_cast<std::size_t>(chunk)];
  return segments().subspan(static_cast<std::size_t>(c.first_segment), static_cast<std::size_t>(c.segment_count));
}

std::span<const Segment> Layout::parameter_segments(std::int64_t parameter) const {
  const auto first = static_cast<std::size_t>(first_of_parameter_[static_cast<std::size_t>(parameter)]);
  const auto last = static_cast<std::size_t>(first_of_parameter_[static_cast<std::size_t>(parameter) + 1]);
  return segments().subspan(first, last - first);
}

Shard Layout::shard(std::int64_t chunk, int rank) const {
  const std::int64_t grains = chunks_[static_cast<std::size_t>(chunk)].count / kGrainElements;
  const std::int64_t begin = grains * rank / partition_.ranks, end = grains * (rank + 1) / partition_.ranks;
  return {begin * kGrainElements, (end - begin) * kGrainElements};
}

Shard Layout::kept(std::int64_t chunk) const {
  if (partition_.cuts()) return shard(chunk, partition_.rank);
  return {0, chunks_[static_cast<std::size_t>(chunk)].count};
}

namespace {

// The part of a segment that lies in a shard of its chunk; count is zero where there is none.
Segment clip(const Segment& segment, const Shard& shard) {
  const std::int64_t begin = std::max(segment.chunk_offset, shard.begin);
  const std::int64_t end = std::min(segment.chunk_offset + segment.count, shard.begin + shard.count);
  Segment out = segment;
  out.chunk_offset = begin - shard.begin;
  out.parameter_offset += begin - segment.chunk_offset;
  out.count = std::max<std::int64_t>(0, end - begin);
  return out;
}

}  // namespace

void Layout::cut_kept() {
  std::size_t chunk = 0, parameter = 0;
  for (const Segment& segment : segments_) {
    const auto here = static_cast<std::int64_t>(kept_.size());
    for (; chunk <= static_cast<std::size_t>(segment.chunk); ++chunk) first_kept_of_chunk_.push_back(here);
    for (; parameter <= static_cast<std::size_t>(segment.parameter); ++parameter)
      first_kept_of_parameter_.push_back(here);
    const Segment part = clip(segment, shard(segment.chunk, partition_.rank));
    if (part.count > 0) kept_.push_back(part);
  }
  first_kept_of_chunk_.resize(chunks_.size() + 1, static_cast<std::int64_t>(kept_.size()));
  first_kept_of_parameter_.resize(parameters_.size() + 1, static_cast<std::int64_t>(kept_.size()));
}

std::span<const Segment> Layout::kept_segments_of_chunk(std::int64_t chunk) const {
  if (!partition_.cuts()) return chunk_segments(chunk);
  const auto first = static_cast<std::size_t>(first_kept_of_chunk_[static_cast<std::size_t>(chunk)]);
  const auto last = static_cast<std::size_t>(first_kept_of_chunk_[static_cast<std::size_t>(chunk) + 1]);
  return kept_segments().subspan(first, last - first);
}

std::span<const Segment> Layout::kept_segments_of_parameter(std::int64_t parameter) const {
  if (!partition_.cuts()) return parameter_segments(parameter);
  const auto first = static_cast<std::size_t>(first_kept_of_parameter_[static_cast<std::size_t>(parameter)]);
  const auto last = static_cast<std::size_t>(first_kept_of_parameter_[static_cast<std::size_t>(parameter) + 1]);
  return kept_segments().subspan(first, last - first);
}

std::vector<Segment> Layout::owned_segments_of_parameter(std::int64_t parameter, int rank) const {
  std::vector<Segment> out;
  for (const Segment& segment : parameter_segments(parameter)) {
    const Segment part = clip(segment, shard(segment.chunk, rank));
    if (part.count > 0) out.push_back(part);
  }
  return out;
}

std::int64_t Layout::most_owned_elements() const {
  // The first chunk is the longest; its largest shard has this many grains.
  if (chunks_.empty()) return 0;
  const std::int64_t grains = chunks_.front().count / kGrainElements;
  return (grains + partition_.ranks - 1) / partition_.ranks * kGrainElements;
}

std::int64_t Layout::most_kept_elements() const {
  return partition_.cuts() ? most_owned_elements() : chunk_elements_;
}

std::int64_t Layout::kept_elements() const {
  std::int64_t sum = 0;
  for (std::size_t c = 0; c < chunks_.size(); ++c) sum += kept(static_cast<std::int64_t>(c)).count;
  return sum;
}

std::int64_t default_chunk_elements(std::int64_t total_elements) {
  constexpr std::int64_t kLeast = 64 * 1024, kMost = 16 * 1024 * 1024;
  return round_up_to_grain(std::clamp(total_elements / 32, kLeast, kMost));
}

}  // namespace spillway
