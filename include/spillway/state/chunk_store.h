// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "spillway/core/dtype.h"
#include "spillway/memory/pool.h"
#include "spillway/state/layout.h"

namespace spillway {

/// The tiers of one chunk's roles. The working parameters are on the device in every schedule so far.
struct ChunkPlacement {
  Tier gradient = Tier::device;
  Tier master = Tier::device;
  Tier optimizer_state = Tier::device;

  static constexpr ChunkPlacement all(Tier tier) { return {tier, tier, tier}; }
  bool operator==(const ChunkPlacement&) const = default;
};

/// What a run keeps, and where: from this alone follow the bytes of every tier and use.
struct StateSpec {
  DType working = DType::f32;             // type of working parameters and of LibTorch's gradients
  DType gradient = DType::f32;            // type of the accumulated gradients: fp32, or the working type
  std::int64_t optimizer_states = 2;      // fp32 numbers an element beside the master
  std::vector<ChunkPlacement> placement;  // one a chunk
  std::int64_t device_slots = 0;          // staging slots of one chunk each
  std::int64_t pinned_slots = 0;
  /// Pinned slots for rounded working copies on their way up: none where the fp32 master itself is uploaded.
  std::int64_t upload_slots = 0;
  /// Where ranks share a gradient: buffers for the pieces of other ranks, and their fp32 sum.
  std::int64_t reduce_slots = 0;
  /// Chunks of one group call between ranks.
  std::int64_t bucket_chunks = 1;
  /// Sums by the transport, in the type that pieces are sent in.
  bool transport_sums = false;
  /// Ranks add what each has accumulated, once a step: so each keeps accumulated gradients of whole chunks. Not at
  /// stage 2.
  bool reduce_last = false;
  /// Where it keeps them off the device: slots of one chunk each, which they pass through on their way to other ranks.
  std::int64_t piece_slots = 0;
  /// Parameters that are not trained (padded elements): kept on the device, without states.
  std::int64_t frozen_elements = 0;

  /// Where it cannot, the norm's grain sums of gradients on the device are kept there, and fetched into pinned memory.
  bool host_reads_device = true;

  /// The type that ranks send gradients to each other in.
  DType piece_type() const { return reduce_last ? gradient : working; }
  /// An fp32 master on the device is the working parameter itself.
  bool master_is_working(Tier master) const { return working == DType::f32 && master == Tier::device; }
};

/// Bytes by tier and use that a run will hold, activations left out.
class MemoryPlan {
 public:
  MemoryUsage& operator[](Tier tier) { return by_tier_[static_cast<std::size_t>(tier)]; }
  const MemoryUsage& operator[](Tier tier) const { return by_tier_[static_cast<std::size_t>(tier)]; }

 private:
  std::array<MemoryUsage, 4> by_tier_{};
};

/// The plan of a state: exactly the bytes that ChunkStore allocates for it, pool padding included.
MemoryPlan plan_state(const Layout& layout, const StateSpec& spec);

/// A buffer that transfers pass through. `slots` are given out in turn by their owner.
struct StagingSlot {
  View view;
  View pieces = {};  // of a reduce slot: what other ranks send, in rank order
};

/// The pools of a run by tier; null where the plan puts nothing there.
struct StatePools {
  std::array<std::unique_ptr<Pool>, 4> by_tier;
  Pool& at(Tier tier);
};

/// The bytes of every chunk's roles.
/// Owns: its pools. Threads: the views are fixed; who may touch their bytes is the lanes' affair.
class ChunkStore {
 public:
  /// Allocates everything from `pools`, which must have been sized by plan_state of the same spec.
  ChunkStore(const Layout& layout, StateSpec spec, StatePools pools);

  const StateSpec& spec() const { return spec_; }
  const ChunkPlacement& placement(std::int64_t chunk) const { return spec_.placement[static_cast<std::size_t>(chunk)]; }

  /// The flattened working parameters on the device, contiguous over all chunks.
  const View& working() const { return working_; }
  /// One chunk of them.
  View working(std::int64_t chunk) const;
  const View& frozen() const { return frozen_; }
  /// Shapes: [what Layout::kept says of the chunk] each; fp32, gradients of spec().gradient.
  const View& master(std::int64_t chunk) const { return roles_[static_cast<std::size_t>(chunk)].master; }
  const View& gradient(std::int64_t chunk) const { return roles_[static_cast<std::size_t>(chunk)].gradient; }
  /// This rank's own sum, of which gradient() is a part, where ranks add theirs once a step; else the same as
  /// gradient(). Shapes: [the chunk's elements] there.
  const View& own_gradient(std::int64_t chunk) const { return roles_[static_cast<std::size_t>(chunk)].own_gradient; }
  const View& optimizer_state(std::int64_t chunk, std::int64_t k) const {
    return roles_[static_cast<std::size_t>(chunk)].states[static_cast<std::size_t>(k)];
  }
  /// The square sums of all grains of the flattened parameters, on the device and fetched to the host; empty where
  /// nobody needs them. Shapes: [grains] fp64 each.
  const View& device_sums() const { return device_sums_; }
  const View& host_sums() const { return host_sums_; }
  /// Shapes: [chunk_elements] of the working type.
  const std::vector<StagingSlot>& device_slots() const { return device_slots_; }
  /// Shapes: [what is kept of a chunk, at most] of the type that gradients come down in: the working type, or the
  /// ranks' sums in fp32; or as many bytes as both need.
  const std::vector<StagingSlot>& pinned_slots() const { return pinned_slots_; }
  /// Shapes: [what is kept of a chunk, at most] of the working type.
  const std::vector<StagingSlot>& upload_slots() const { return upload_slots_; }
  /// Shapes: the sum [what is kept of a chunk, at most], fp32; pieces [ranks - 1][the largest shard] of
  /// spec().piece_type().
  const std::vector<StagingSlot>& reduce_slots() const { return reduce_slots_; }
  /// Shapes: [chunk_elements] of spec().piece_type().
  const std::vector<StagingSlot>& piece_slots() const { return piece_slots_; }

 private:
  struct Roles {
    View master, gradient, own_gradient;
    std::vector<View> states;
  };

  const Layout& layout_;
  const StateSpec spec_;
  StatePools pools_;
  View working_, frozen_, device_sums_, host_sums_;
  std::vector<Roles> roles_;
  std::vector<StagingSlot> device_slots_, pinned_slots_, upload_slots_, reduce_slots_, piece_slots_;
};

}  // namespace spillway
