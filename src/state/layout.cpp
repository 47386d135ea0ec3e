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

Layout::Layout(std::vector<ParameterInfo> parameters, std::int64_t chunk_elements)
    : parameters_(std::move(parameters)) {
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

std::int64_t default_chunk_elements(std::int64_t total_elements) {
  constexpr std::int64_t kLeast = 64 * 1024, kMost = 16 * 1024 * 1024;
  return round_up_to_grain(std::clamp(total_elements / 32, kLeast, kMost));
}

}  // namespace spillway
