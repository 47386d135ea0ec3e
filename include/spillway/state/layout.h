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

/// How ranks share the states. Stage 0: every rank has all; 1: masters and optimizer states are cut; 2: gradients too.
/// Source: ZeRO (Rajbhandari et al., SC 2020, arXiv 1910.02054), section 5.
struct Partition {
  int ranks = 1;
  int rank = 0;
  int stage = 0;

  bool shared() const { return ranks > 1; }
  bool cuts() const { return ranks > 1 && stage >= 1; }
  bool operator==(const Partition&) const = default;
};

/// The part of a chunk that a rank owns, or keeps, in the chunk's elements: multiples of the grain.
struct Shard {
  std::int64_t begin = 0;
  std::int64_t count = 0;

  bool operator==(const Shard&) const = default;
};

/// Where every parameter lies in the flattened parameters, how those are cut into chunks, and what of these a rank
/// keeps.
/// Units: elements throughout, 64-bit.
class Layout {
 public:
  /// Parameters in the given order, each start padded to a grain; chunks of `chunk_elements` rounded up to grains (the
  /// last one as long as needed). Parameters without elements have no segments.
  /// Throws: InvalidArgument when a count overflows, chunk_elements is below one, or for a partition that is none.
  Layout(std::vector<ParameterInfo> parameters, std::int64_t chunk_elements, Partition partition = {});

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

  const Partition& partition() const { return partition_; }
  /// What `rank` owns of a chunk: its grains are dealt out evenly and in order, so that small chunks leave ranks with
  /// nothing.
  Shard shard(std::int64_t chunk, int rank) const;
  /// What this rank keeps states of: its shard, or the whole chunk at stage 0.
  Shard kept(std::int64_t chunk) const;
  /// The parts of segments that this rank keeps; chunk_offset counts from the begin of what it keeps. Those of
  /// segments() themselves where nothing is cut.
  std::span<const Segment> kept_segments() const { return partition_.cuts() ? kept_ : segments_; }
  std::span<const Segment> kept_segments_of_chunk(std::int64_t chunk) const;
  std::span<const Segment> kept_segments_of_parameter(std::int64_t parameter) const;
  /// The same for another rank, in order.
  std::vector<Segment> owned_segments_of_parameter(std::int64_t parameter, int rank) const;
  /// The most that any rank owns, or this one keeps, of any chunk.
  std::int64_t most_owned_elements() const;
  std::int64_t most_kept_elements() const;
  /// What this rank keeps of all chunks.
  std::int64_t kept_elements() const;

 private:
  void cut_segments();
  void cut_kept();

  std::vector<ParameterInfo> parameters_;
  std::int64_t chunk_elements_;
  Partition partition_;
  std::int64_t padded_ = 0;
  std::vector<std::int64_t> offsets_;
  std::vector<Chunk> chunks_;
  std::vector<Segment> segments_;                 // in flat order: a chunk's and a parameter's are neighbours
  std::vector<std::int64_t> first_of_parameter_;  // one more than parameters
  std::vector<Segment> kept_;                     // empty where nothing is cut
  std::vector<std::int64_t> first_kept_of_parameter_, first_kept_of_chunk_;  // one more than there are
};

/// The chunk size chosen where none is given: about a thirty-second of the parameters, from 64 Ki to 16 Mi elements
/// (64 MB in fp32, where a superchip's link saturates: SuperOffload, arXiv 2509.21271).
std::int64_t default_chunk_elements(std::int64_t total_elements);

}  // namespace spillway
