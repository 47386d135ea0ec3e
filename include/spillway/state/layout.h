// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace spillway {

/// Elements of one grain: parameter starts are padded to it, and everything is cut at its multiples.
inline constexpr std::int64_t kGrainElements = 1024;

/// A trainable parameter as the state sees it.
struct ParameterInfo {
  std::string name;
  std::vector<std::int64_t> shape;
  int group = 0;

  std::int64_t numel() const;
};

/// A run of elements inside a chunk that belongs to one parameter.
struct Segment {
  std::int64_t parameter = 0;
  std::int64_t chunk = 0;
  std::int64_t chunk_offset = 0;      // where it starts in the chunk
  std::int64_t parameter_offset = 0;  // where it starts in the parameter
  std::int64_t count = 0;

  /// Grains it covers, the last perhaps in part.
  std::int64_t grains() const { return (count + kGrainElements - 1) / kGrainElements; }
};

/// A contiguous run of grains of the flattened parameters.
struct Chunk {
  std::int64_t begin = 0;  // in the flattened parameters
  std::int64_t count = 0;  // elements, padding included: a multiple of the grain
  std::int64_t first_segment = 0;
  std::int64_t segment_count = 0;
};

/// Where every parameter lies in the flattened parameters, and how those are cut into chunks.
/// Units: elements throughout, 64-bit.
class Layout {
 public:
  /// Parameters in the given order, each start padded to a grain; chunks of `chunk_elements` rounded up to grains (the
  /// last one as long as needed). Parameters without elements have no segments.
  /// Throws: InvalidArgument when a count overflows or chunk_elements is below one.
  Layout(std::vector<ParameterInfo> parameters, std::int64_t chunk_elements);

  std::span<const ParameterInfo> parameters() const { return parameters_; }
  std::span<const Chunk> chunks() const { return chunks_; }
  std::span<const Segment> segments() const { return segments_; }
  std::span<const Segment> chunk_segments(std::int64_t chunk) const;
  std::span<const Segment> parameter_segments(std::int64_t parameter) const;
  /// Where a parameter starts in the flattened parameters.
  std::int64_t offset(std::int64_t parameter) const { return offsets_[static_cast<std::size_t>(parameter)]; }
  /// All parameters with their padding.
  std::int64_t padded_elements() const { return padded_; }
  std::int64_t chunk_elements() const { return chunk_elements_; }

 private:
  void cut_segments();

  std::vector<ParameterInfo> parameters_;
  std::int64_t chunk_elements_;
  std::int64_t padded_ = 0;
  std::vector<std::int64_t> offsets_;
  std::vector<Chunk> chunks_;
  std::vector<Segment> segments_;                 // in flat order: a chunk's and a parameter's are neighbours
  std::vector<std::int64_t> first_of_parameter_;  // one more than parameters
};

/// The chunk size chosen where none is given: about a thirty-second of the parameters, from 64 Ki to 16 Mi elements
/// (64 MB in fp32, where a superchip's link saturates: SuperOffload, arXiv 2509.21271).
std::int64_t default_chunk_elements(std::int64_t total_elements);

}  // namespace spillway
