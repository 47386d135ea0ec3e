// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/lane/ticket.h"
#include "spillway/runtime/machine.h"
#include "spillway/runtime/oracle.h"
#include "spillway/state/chunk_store.h"
#include "spillway/state/layout.h"

namespace spillway {

/// A parameter's gradient as LibTorch left it: contiguous, in the working type, readable in compute order until the
/// call it is passed to returns.
struct Gradient {
  std::int64_t parameter = 0;
  const std::byte* data = nullptr;
};

/// A staging slot and the ticket of the op that last needed its contents.
struct Slot {
  View view;
  Ticket free;
  View pieces = {};  // of a reduce slot: what the other ranks send
};

/// Which sums of gradients an op is about: those of the step, or where ranks add theirs in the last micro-batch only,
/// what this rank has accumulated by itself until then.
enum class Sums { step, own };

/// Gradients of a chunk that all ranks staged, to be summed: the same segments on every rank.
struct Reduction {
  std::int64_t chunk = 0;
  std::vector<const Segment*> segments = {};
  Slot* staged = nullptr;  // whole, in the type of pieces
  Slot* sum = nullptr;     // a reduce slot
  Ticket ready;            // of staged
};

/// Slots given out in turn. The next one is always the one used longest ago, so that the order of ops never depends on
/// time.
class SlotRing {
 public:
  explicit SlotRing(const std::vector<StagingSlot>& slots);
  std::size_t size() const { return slots_.size(); }
  const std::vector<Slot>& slots() const { return slots_; }
  /// The slot whose turn it is. Its contents may be overwritten after its `free` ticket.
  Slot& next();

 private:
  std::vector<Slot> slots_;
  std::size_t turn_ = 0;
};

/// What one optimizer step uses beyond the state itself.
struct StepScale {
  float grad_factor = 1;  // one fp32 number applied to every gradient on load
};

/// A role of one parameter's state, for reading and writing it whole.
struct StateRole {
  enum class Kind { master, gradient, optimizer_state };
  Kind kind = Kind::master;
  std::int64_t k = 0;  // which optimizer state
};

/// One parameter's whole state, contiguous, as an update rule is given it.
/// Owns: nothing; valid during the call.
struct RuleArrays {
  std::int64_t parameter = 0;
  std::int64_t count = 0;
  std::int64_t updates = 0;  // this one included
  bool on_device = false;    // else all arrays are in host memory
  float* master = nullptr;
  std::byte* gradient = nullptr;  // as accumulated: the true gradient is this times grad_factor; spent after the call
  DType gradient_type = DType::f32;
  float grad_factor = 1;
  std::vector<float*> states;  // zero before the first update
  Hyperparameters hyperparameters;
};
/// Replaces the optimizer for a parameter. Threads: called on the lane of the parameter's masters.
using UpdateRule = std::function<void(const RuleArrays&)>;

/// The verbs that schedules are written in, and the state they act on.
///
/// Each verb makes the body of an op and submits it to the lane that placement chooses; it returns the op's ticket and
/// never waits for it unless its name or contract says so. Verbs also keep the books that order alone decides: which
/// parameters have a gradient in this step, how often each was updated, which upload each chunk waits for.
/// On a virtual machine no verb touches memory: Gradient::data may be null.
/// Threads: one at a time (engine calls and the hooks inside them).
class Runtime {
 public:
  /// `hyperparameters`: one a group of the layout. `machine` and `layout` must outlive the runtime.
  Runtime(Machine& machine, const Layout& layout, StateSpec spec, OptimizerKind optimizer,
          std::vector<Hyperparameters> hyperparameters);
  ~Runtime();

  Machine& machine() { return machine_; }
  const Layout& layout() const { return layout_; }
  const ChunkStore& store() const { return *store_; }
  std::vector<Hyperparameters>& hyperparameters() { return hyperparameters_; }
  SlotRing& device_slots() { return device_slots_; }
  SlotRing& pinned_slots() { return pinned_slots_; }
  SlotRing& reduce_slots() { return reduce_slots_; }
  /// Whether ranks add what each has accumulated by itself, once a step.
  bool reduces_last() const { return spec_.reduce_last; }

  // ---- gradients --------------------------------------------------------------------------------------------------
  /// Compute: copies the segment's part of a gradient into a chunk's device slot, once the slot is free, after `before`
  /// (what was staged into it already).
  [[nodiscard]] Ticket stage(const Segment& segment, const Gradient& gradient, Slot& slot, Ticket before);
  /// Compute: zeros in the place of segments that had no gradient here, but may have one on another rank.
  [[nodiscard]] Ticket stage_zeros(std::span<const Segment* const> segments, Slot& slot, Ticket before);
  /// Network: every rank's part of each chunk goes to its owner, who adds them in fp32, in rank order; at stage 0 all
  /// get the sum. One group call. Frees the staged slots. Source: docs/numerics.md, Ranks.
  [[nodiscard]] Ticket reduce(std::span<const Reduction> chunks);
  /// What of this rank's own sums others are to get: segments of one chunk, in a buffer on the device after the ticket;
  /// zeros where it has no gradient. Compute or cpu for these zeros; upload where the sums are not on the device.
  struct Offer {
    Slot* slot = nullptr;
    Ticket ready;
  };
  [[nodiscard]] Offer offer(std::span<const Segment* const> segments);
  /// Whether this step's own sums have been added. Nothing may be accumulated any more until the step ends.
  bool ranks_added() const { return ranks_added_; }
  void note_ranks_added() { ranks_added_ = true; }
  /// An order of gradients, followed by the other parameters that have had one in this step.
  std::vector<std::int64_t> with_earlier_gradients(std::vector<std::int64_t> order) const;
  /// What this rank keeps of segments.
  std::vector<const Segment*> kept_of(std::span<const Segment* const> segments) const;
  /// Network: adds the ranks' sum of kept segments of one chunk to the accumulated gradients, where these stay on the
  /// device; frees it.
  [[nodiscard]] Ticket accumulate_sum(std::span<const Segment* const> kept, Slot& sum, Ticket reduced);
  /// The order in which the next backward's gradients come, on any rank: of parameters that have one on at least one.
  /// With several ranks, before each backward; the same on all ranks.
  void set_gradient_order(std::vector<std::int64_t> parameters) { gradient_order_ = std::move(parameters); }
  const std::vector<std::int64_t>& gradient_order() const { return gradient_order_; }
  /// Download: copies `segments` of one chunk from a device slot (with several ranks: the kept ones, from a reduce
  /// slot, unless `sums` are its own) to a pinned slot, after `staged`; frees the device slot.
  [[nodiscard]] Ticket copy_down(std::span<const Segment* const> segments, Slot& device, Slot& pinned, Ticket staged,
                                 Sums sums = Sums::step);
  /// Adds `segments` of one chunk, which stand in a pinned slot since `arrived`, to the accumulated gradients on the
  /// cpu lane (the first of a step replaces what was there); frees the pinned slot.
  [[nodiscard]] Ticket accumulate(std::span<const Segment* const> segments, Slot& pinned, Ticket arrived,
                                  Sums sums = Sums::step);
  /// The same on the compute lane, straight from LibTorch's gradient, for chunks whose gradients stay on the device.
  [[nodiscard]] Ticket accumulate(const Segment& segment, const Gradient& gradient, Sums sums = Sums::step);
  /// Adds the segments' final gradients to the norm, on the lane where they lie. Later gradients make them pending
  /// again.
  [[nodiscard]] Ticket norm(std::span<const Segment* const> segments);
  /// Submits norm() for every segment with a gradient that has not been counted since it last changed, then waits.
  /// Blocks: until all gradients are accumulated and counted. Throws: the error of a failed op.
  GradientNorm wait_norm();
  /// Ranks tell each other which parameters had a gradient in this step: what any had, all have. With several ranks
  /// once a step, before what follows asks for it. Blocks: until all ranks have called.
  void wait_agree_gradients();
  /// Whether the parameter has had a gradient in this step.
  bool has_gradient(std::int64_t parameter) const;
  bool has_gradient_in_chunk(std::int64_t chunk) const;
  /// Forgets this step's gradients. Blocks: until the ops that use them are done.
  void wait_discard_gradients() noexcept;
  /// "layer3.w (2 NaN, 1 infinite of 4096)" for the first `most` parameters whose gradients are not finite. Reads
  /// memory: meant for the message of a skipped step.
  std::vector<std::string> describe_non_finite(std::size_t most);

  // ---- update -----------------------------------------------------------------------------------------------------
  /// Counts one more update for each parameter with a gradient: once a step, before its update() calls.
  void begin_update();
  /// The optimizer step of a chunk's segments with a gradient, on the lane of its masters; a 16-bit working copy is
  /// written in the same pass. Order: where masters are not on the device, copy_up of this chunk comes before the
  /// update of another one.
  [[nodiscard]] Ticket update(std::int64_t chunk, StepScale scale);
  /// Upload: brings a chunk's updated working parameters to the device, after `updated` and all compute so far; what
  /// wait_parameters waits for. Nothing to do where the masters are on the device.
  [[nodiscard]] Ticket copy_up(std::int64_t chunk, Ticket updated);
  /// Network: brings what other ranks updated of these chunks, after `after` and all compute so far; what
  /// wait_parameters waits for. One group call; nothing to do where states are not cut.
  void gather(std::span<const std::int64_t> chunks, std::vector<Ticket> after);
  /// Ends the step: gradients are spent.
  void end_update();

  // ---- parameters -------------------------------------------------------------------------------------------------
  /// Compute given after this call sees the newest values of the chunk. Blocks: as ComputeLane::wait.
  void wait_parameters(std::int64_t chunk);
  /// For all chunks; and on the host too: after it, device memory may be read. Blocks: until all lanes have nothing
  /// left that touches parameters, masters or optimizer states.
  void wait_all();
  /// Waits as wait_all, whatever fails. Blocks. Returns whether every update and upload went well.
  bool wait_idle() noexcept;
  /// Copies the parameter's working values into its fp32 masters, where these are apart. Blocks: as wait_all.
  void load_masters(std::int64_t parameter);
  std::int64_t updates(std::int64_t parameter) const {
    return parameters_[static_cast<std::size_t>(parameter)].updates;
  }
  void set_updates(std::int64_t parameter, std::int64_t updates) {
    parameters_[static_cast<std::size_t>(parameter)].updates = updates;
  }

  /// Copies state to and from host memory, wherever it is, after what compute was given. Others must not write it at
  /// the same time: wait_all() comes first. Blocks: until it is copied.
  void wait_read(void* to, const View& from);
  void wait_write(const View& to, const void* from);

  // ---- reading and setting whole states -----------------------------------------------------------------------------
  /// Copies a parameter's state out, as fp32; gradients as accumulated, before any factor. Shapes: [numel]. Where
  /// states are cut, all ranks make the call and get all of it. Blocks: as wait_all. Throws: StateError for gradients
  /// that ranks have not added yet, here and in what follows.
  void read(StateRole role, std::int64_t parameter, float* values);
  /// Copies one of the layout's kept segments out, or in, without asking other ranks. Of masters the working values are
  /// left to wait_gather_working(). Shapes: [segment.count]. Blocks: as wait_all.
  void read_part(StateRole role, const Segment& kept, float* values);
  void write_part(StateRole role, const Segment& kept, const float* values);
  /// Working values of all chunks from the masters of all ranks, rounded. All ranks make the call. Blocks: as wait_all.
  void wait_gather_working();
  /// Sets it. A master sets the working values too, rounded; a gradient becomes the step's and is counted in the norm
  /// again. Shapes: [numel]. Blocks: as wait_all.
  void write(StateRole role, std::int64_t parameter, const float* values);
  /// From the next step on, `rule` updates the parameter. Throws: InvalidArgument where its chunks do not share a tier,
  /// or ranks share its states.
  void set_update_rule(std::int64_t parameter, UpdateRule rule);

  /// Takes every piece of state that only the pools hold to `save`, in a fixed order, calls `saved`, and gives the
  /// pools back. No verb may be called until restore(). Order: between steps. Blocks: as wait_all. Throws: what the two
  /// throw; then nothing has changed.
  void release(const std::function<void(const void* data, std::size_t bytes)>& save,
               const std::function<void()>& saved);
  /// Makes the pools again and fills them from `load`, in the order of release(). Working parameters are left to the
  /// caller. Throws: OutOfMemory; what `load` throws: the runtime stays released.
  void restore(const std::function<void(void* data, std::size_t bytes)>& load);
  bool released() const { return store_ == nullptr; }

 private:
  struct ParameterState {
    std::int64_t updates = 0;
    bool has_gradient = false;
    bool rule_submitted = false;  // in this step
    UpdateRule rule;              // empty: the optimizer
  };
  struct SegmentState {
    bool accumulated = false;  // has a gradient of this step
    bool counted = false;      // is in the norm
  };
  struct Impl;

  struct NormItem;
  using OpBody = std::function<void(StreamRef)>;
  OpBody norm_on_device(std::int64_t chunk, std::vector<NormItem> items);
  OpBody norm_on_host(std::int64_t chunk, bool device, std::vector<NormItem> items);
  /// Fetches the grain sums of gradients on a device that the host cannot read. Blocks: until they are here.
  void wait_device_sums();
  /// Fills in what other ranks keep of a parameter. Blocks: until all ranks have called.
  void gather_values(std::int64_t parameter, float* values);
  void wait_copy(void* to, const void* from, Bytes bytes);
  void wait_write_rounded(const View& to, DType type, const float* values);
  bool host_reads(const View& view) const { return view.tier != Tier::device || machine_.host_reads_device(); }
  /// Where update() writes a chunk's rounded working copy: null in fp32. Takes the next upload slot if one is needed.
  std::byte* working_copy_target(std::int64_t chunk);
  /// Bytes that adding one element to its sum moves.
  std::int64_t bytes_of_sum(Sums sums) const;
  void make_store(const StateSpec& spec);
  void clear_states();
  RuleArrays rule_arrays(std::int64_t parameter, float grad_factor) const;
  /// Calls visit with every view that only the pools hold: masters apart from working values, and optimizer states.
  template <class Visit>
  void for_kept_views(const ChunkStore& store, const Visit& visit) const;
  /// The chunk's segments that have a gradient in this step.
  std::vector<const Segment*> updated_segments(std::int64_t chunk) const;
  bool on_device(Tier tier) const { return tier == Tier::device; }
  Lane& lane_of(Tier tier);
  /// Of a kept segment.
  std::int64_t index_of(const Segment& segment) const { return &segment - layout_.kept_segments().data(); }
  /// The type that gradients leave the device in.
  DType arriving_type(Sums sums) const {
    return layout_.partition().shared() && sums == Sums::step ? DType::f32 : spec_.working;
  }
  const View& sums_of(std::int64_t chunk, Sums sums) const {
    return sums == Sums::own ? store_->own_gradient(chunk) : store_->gradient(chunk);
  }
  void check_ranks_added() const;
  /// Where in a chunk what is kept starts.
  std::int64_t kept_begin(std::int64_t chunk) const { return layout_.kept(chunk).begin; }
  bool master_is_working(std::int64_t chunk) const {
    return spec_.master_is_working(spec_.placement[static_cast<std::size_t>(chunk)].master);
  }
  /// Marks a kept segment (of its own sums: any) as having a gradient; returns whether it is the step's first.
  bool note_gradient(const Segment& segment, Sums sums = Sums::step);

  Machine& machine_;
  const Layout& layout_;
  const OptimizerKind optimizer_;
  std::vector<Hyperparameters> hyperparameters_;
  StateSpec spec_;
  std::unique_ptr<ChunkStore> store_;  // null while released
  SlotRing device_slots_, pinned_slots_, upload_slots_, reduce_slots_, piece_slots_;
  Slot* upload_slot_ = nullptr;  // written by the newest update(), until copy_up() sends it
  std::vector<std::int64_t> gradient_order_;
  std::vector<ParameterState> parameters_;
  std::vector<SegmentState> segments_;
  std::vector<bool> own_;            // segments that this rank's own sums have a gradient of
  std::vector<Slot> own_on_device_;  // a chunk's own sums, where these are pieces already
  bool ranks_added_ = false;
  std::vector<Ticket> uploads_;       // a chunk's newest copy_up
  std::vector<Ticket> updates_;       // a chunk's newest update
  std::vector<Ticket> gradient_ops_;  // a chunk's newest accumulate or norm
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
