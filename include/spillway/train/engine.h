// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "spillway/comm/communicator.h"
#include "spillway/core/config.h"
#include "spillway/core/log.h"
#include "spillway/core/trace.h"
#include "spillway/core/units.h"
#include "spillway/lane/lane.h"
#include "spillway/models/causal_lm.h"
#include "spillway/state/chunk_store.h"
#include "spillway/train/checkpoint.h"
#include "spillway/train/device_scope.h"
#include "spillway/train/recomputed_block.h"

namespace spillway {

/// Chooses parameters in code: by the name in named_parameters(), and by the tensor (its shape).
using ParameterPredicate = std::function<bool(const std::string& name, const torch::Tensor& parameter)>;

/// A parameter group in code: those that `applies` says yes to and `group.match` and `group.max_dims` let through.
struct GroupRule {
  ParameterPredicate applies;
  GroupConfig group = {};
};

/// What an update rule of the program's own reads and writes, in place. Shapes: the parameter's, fp32; the tensors lie
/// where the schedule keeps them (host memory, or the device with `resident`) and are valid during the call.
struct ParameterUpdate {
  std::string name;
  torch::Tensor master;
  torch::Tensor gradient;             // of the whole step: averaged, unscaled, clipped
  std::vector<torch::Tensor> states;  // two, zero before the first update: kept and saved like an optimizer's
  std::int64_t update = 0;            // of this parameter, from 1
  Hyperparameters hyperparameters;    // of its group, the schedule's learning rate in it
};

/// Replaces the optimizer for the parameters it applies to.
/// Threads: `rule` is called on the lane that holds the states (another thread, where those are on the host), without
/// gradients, one parameter at a time; what it throws comes out of the call that waits and ends the engine.
struct OwnUpdate {
  ParameterPredicate applies;
  std::function<void(ParameterUpdate& update)> rule = {};
};

/// What only programs set, beside the configuration.
struct EngineOptions {
  std::int64_t trace_events = 0;  // spans kept for write_trace(); 0: totals only
  OpDelay delay = {};             // called around every op of every lane: for tests of races
  LogHandler log = {};            // where messages go; empty: spdlog, on standard error
  /// Groups in code, numbered after Config::groups; a parameter belongs to the first that applies, and these come
  /// before those of the configuration.
  std::vector<GroupRule> groups = {};
  std::vector<OwnUpdate> updates = {};
  /// What forward and backward will hold on the device (Engine::profile, profile_activations): part of the plan, so
  /// that a run that cannot fit is refused before it starts.
  std::optional<Bytes> activations = std::nullopt;
  /// Where parameters come from instead of the module's memory: asked once for each, by its name, one at a time; an
  /// undefined tensor means the module's own values. With a module that was not initialised (empty_causal_lm) and
  /// folder_weights a run is set up in the memory of its plan and one tensor. Shapes: the parameter's, any floating
  /// type; masters keep the exact values.
  std::function<torch::Tensor(const std::string& name)> weights = {};
  /// The ranks that train this model together; null, or a world of one: this process alone. Must outlive the engine.
  Communicator* communicator = nullptr;
};

/// How a block is called.
struct CallOptions {
  /// The block keeps its inputs alone and computes its activations again in backward: the same bits, less memory, one
  /// more forward. Not given: Config::recompute.
  std::optional<bool> recompute = std::nullopt;
};

struct BackwardOptions {
  /// This micro-batch's share of the step: usually its number of valid targets. A micro-batch of weight 0 contributes
  /// nothing, not even a NaN.
  double weight = 1;
  /// No other micro-batch follows in this step. Not given: decided by Config::accumulation. A hint for overlap: a
  /// backward after the last is added all the same, or refused under Config::reduce_last_only.
  std::optional<bool> last = std::nullopt;
};

enum class StepStatus {
  updated,
  not_finite,  // a gradient was infinite or NaN: nothing was changed, the learning-rate schedule stands still
  empty,       // every weight was 0, or nothing had a gradient: nothing was changed
};
std::string_view to_string(StepStatus status);

struct StepResult {
  StepStatus status = StepStatus::updated;
  std::int64_t step = 0;     // updates done so far, this one included
  double grad_norm = 0;      // L2 norm of the step's gradient before clipping
  double loss_scale = 1;     // of the next step: moves in fp16 only
  double lr = 0;             // of the optimizer's own group, used by this step
  std::int64_t skipped = 0;  // steps skipped so far
  Bytes device_peak;         // the most the device held since the engine was made
  Bytes host_peak;           // the most of pinned and host memory
};

/// What lanes did since the engine was made.
struct EngineSummary {
  MemoryPlan plan;             // promised
  MemoryUsage device_at_peak;  // measured
  Bytes device_capacity;       // below zero: not limited
  Bytes device_peak, host_peak;
  bool low_memory_accumulation = false;  // gradients were summed in the working type
  std::vector<TrackTotal> lanes;
};

/// Trains a module whose states do not fit on the device.
///
/// In bf16 and fp16 the engine converts an fp32 module's parameters (masters keep the exact values); a module that is
/// in that type already has masters of its rounded values. Buffers keep their type.
///
/// The engine moves the module's parameters to the device, keeps masters, gradients and optimizer states where the
/// configured schedule puts them, takes every gradient as soon as LibTorch has it, and updates the parameters. It owns
/// no training loop: forward is the module's own, the loop is the program's.
///
/// The step's gradient is sum(weight_i x grad(loss_i)) / sum(weight_i) over its micro-batches. Between backward() and
/// step() the module has its old weights.
///
/// After step(), new weights may still be on their way for blocks whose training forward went through call() since the
/// step before: their next forward must go through it too, and call() awaits them. Everything else is waited for inside
/// step(). To read or write weights elsewhere: wait_parameters() first; a write that comes too early is lost, and found
/// out: StateError (set_weight mends that one).
///
/// While backward runs, gradients are multiples of the true ones (by the micro-batch's weight and the loss scale): that
/// is what a program's own hooks, and leaves outside of the module, see.
///
/// With several ranks (EngineOptions::communicator) every rank makes an engine of the same model with the same values
/// and configuration, and calls backward(), step() and whatever below says "on all ranks" as often and in the same
/// order as the others. Gradients are averaged over the weights of all ranks' micro-batches; a rank without data calls
/// backward with an undefined loss and weight 0. Results are the same on every rank. A call on all ranks that throws on
/// one, out of memory too, throws on all and ends their engines: resume from a checkpoint. Only a refused load() leaves
/// them as they were.
///
/// On the emulated device the thread that makes the engine allocates device memory until the engine is destroyed
/// (DeviceScope); data loaders use HostScope. Where a thread has several engines, what is made inside call(),
/// backward() and profile() counts for theirs, and what is made outside of them for the newest.
///
/// Owns: the parameters' memory while it lives; its destructor gives the module ordinary memory with the newest weights
/// back. The module must outlive it, and no parameter of it may belong to another engine. Every CausalLM in the module
/// is bound (its blocks go through call()) until then.
/// Threads: all calls from the thread that made it, which is also where LibTorch must run backward on CPU. Others:
/// StateError. A forked child has none of its threads and must not call it.
class Engine {
 public:
  /// Blocks: until all states are in place.
  /// Throws: OutOfMemory before anything is moved when the plan does not fit, with the bytes missing and a schedule
  /// that would fit; InvalidArgument for a configuration, a parameter or a buffer that is not supported, by name.
  Engine(torch::nn::Module& model, Config config, EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs block->forward(inputs...) once the block's newest parameters have arrived. `block`: a module holder, a
  /// shared_ptr to a module, or a module; its parameters() must be all it reads of this model. With recompute, forward
  /// must return a tensor or a vector of tensors, and give the same when called again: LibTorch's random numbers (and a
  /// CausalLM's dropout) are set back for that; other state is the block's own affair.
  /// Throws: what forward throws; InvalidArgument for recompute of a block that returns something else, changes an
  /// input in place, takes tensors that need gradients inside of the standard library's or LibTorch's other types, or
  /// is called under autocast.
  template <class BlockType, class... Inputs>
  auto call(BlockType& block, CallOptions options, Inputs&&... inputs) {
    auto& module = dereference(block);
    using Result = decltype(module.forward(std::forward<Inputs>(inputs)...));
    if (!recomputes(options)) {
      const BlockScope scope(*this, module, rows_of(inputs...));
      return module.forward(std::forward<Inputs>(inputs)...);
    }
    if ((detail::needs_gradient_inside(inputs) || ...)) refuse_tensors_inside(module);
    if constexpr (std::is_same_v<Result, torch::Tensor> || std::is_same_v<Result, std::vector<torch::Tensor>>) {
      detail::RecomputedBlock<std::decay_t<decltype(module)>, std::decay_t<Inputs>...> again(
          module, std::forward<Inputs>(inputs)...);
      std::vector<torch::Tensor> tensors = again.take_tensors();
      const std::int64_t rows = tensors.empty() ? 0 : rows_of(tensors.front());
      std::vector<torch::Tensor> outputs = call_recomputed(module, std::move(again), std::move(tensors), rows);
      if constexpr (std::is_same_v<Result, torch::Tensor>) {
        return outputs.at(0);
      } else {
        return outputs;
      }
    } else {
      refuse_recompute(module);
      return module.forward(std::forward<Inputs>(inputs)...);
    }
  }
  template <class BlockType, class... Inputs>
  auto call(BlockType& block, Inputs&&... inputs) {
    return call(block, CallOptions{}, std::forward<Inputs>(inputs)...);
  }

  /// The same as a value for models that take one (CausalLM is bound by the constructor). Valid while the engine lives.
  BlockCall block_call();

  /// Adds the gradients of weight x loss to the step. `loss`: one element, fp32 or fp64; its graph is freed, so losses
  /// over one graph are added first. On all ranks.
  /// Blocks: for the computation; for transfers only where staging slots are all in use.
  /// Throws: InvalidArgument for a loss or a weight that it does not take: nothing has changed. What LibTorch throws,
  /// OutOfMemory among it: then the whole step's gradients are forgotten, weights and states are as before, and the
  /// step may start again.
  void backward(const torch::Tensor& loss, BackwardOptions options = {});

  /// Updates the parameters with the gradients of all backwards since the last step. On all ranks.
  /// Blocks: until the norm is known and updates are under way.
  /// Parameters that the program wrote to since the last step (under no-grad) are taken as they are now.
  /// Throws: StateError without a backward before, for a parameter that was added, moved, converted or thawed, in fp16
  /// when the loss scale cannot fall any further; the error of an op that failed: then the engine refuses all later
  /// calls.
  StepResult step();

  /// Forgets the gradients of all backwards since the last step: for a step that starts again after an exception in
  /// forward, say. Weights, states and the learning-rate schedule stay as they are. On all ranks. Blocks: until these
  /// gradients have come where they are summed. Throws: StateError where the engine is released or failed.
  void discard_step();

  /// The learning rate of a group from the next step on (the schedule's factor still applies). Group 0: the optimizer's
  /// own; others in the order of Config::groups. Throws: InvalidArgument.
  void set_lr(double lr, std::size_t group = 0);

  /// Blocks: until all weights are those of the last step, on the device and everywhere. Throws: StateError for one
  /// that was written too early.
  void wait_parameters();

  /// All of a group's numbers from the next step on; its lr as set_lr. Throws: InvalidArgument.
  void set_hyperparameters(const Hyperparameters& hyperparameters, std::size_t group = 0);
  /// A group's numbers, before the learning-rate schedule.
  const Hyperparameters& hyperparameters(std::size_t group = 0) const;
  /// The group a trained parameter belongs to. Throws: InvalidArgument.
  std::size_t group_of(const std::string& name) const;

  /// Copies of one parameter's state, in ordinary memory. `name`: as in named_parameters(). Blocks: as wait_parameters.
  /// On all ranks where states are cut.
  /// Throws: InvalidArgument for an unknown name (with the nearest) or a parameter that is not trained.
  /// Shapes: the parameter's, fp32.
  torch::Tensor master(const std::string& name);
  /// The most exact value there is of a parameter: its master, or the working value of one that is not trained.
  torch::Tensor weight(const std::string& name);
  /// `k`: 0 the first moment, 1 the second.
  torch::Tensor optimizer_state(const std::string& name, std::int64_t k);
  /// How often the parameter was updated.
  std::int64_t updates(const std::string& name);
  /// The gradient of the step that is going on, averaged over its micro-batches so far and unscaled, before clipping:
  /// what step() would use. Undefined where the parameter had none. On all ranks. Throws: StateError under
  /// Config::reduce_last_only before the last backward, and for set_gradient too.
  torch::Tensor gradient(const std::string& name);

  /// Sets one parameter's state from a tensor of its shape, any floating type, the same on all ranks. Blocks: as
  /// wait_parameters. Throws: InvalidArgument for an unknown name, another shape, or a `k` that is not there.
  ///
  /// The weight becomes the master, and its rounded value the working parameter; parameters that are not trained too.
  void set_weight(const std::string& name, const torch::Tensor& value);
  void set_optimizer_state(const std::string& name, std::int64_t k, const torch::Tensor& value);
  /// The number of updates that the optimizer's bias correction counts from.
  void set_updates(const std::string& name, std::int64_t updates);
  /// Replaces the gradient of the step that is going on, in the scale of gradient(); norm, clipping and the check for
  /// finite values are those of what was set. A parameter without a gradient has one then. Stored after division by the
  /// step's factor: exact for one micro-batch, else rounded once. Throws: StateError before the
  /// step's first backward.
  void set_gradient(const std::string& name, const torch::Tensor& value);

  /// Runs one forward and backward of `loss`, on all ranks, and drops its gradients: nothing changes but memory's
  /// high-water marks (random numbers and buffers are set back). Returns the plan with the activations that were
  /// measured; on the emulated device the limit is lifted meanwhile, so that the whole need is known. Throws:
  /// OutOfMemory with the bytes that are missing when the plan does not fit; StateError inside a step.
  MemoryPlan profile(const std::function<torch::Tensor()>& loss);

  /// Gives all device and pinned memory back between phases: the module gets ordinary memory with the newest weights,
  /// masters and optimizer states go to ordinary memory, or to `file` (made, and removed by restore() or the
  /// destructor). Until restore() only the module may be used; another release() changes nothing. Throws: StateError
  /// inside a step; InvalidArgument where there is a `file`; FileError and OutOfMemory: then nothing has changed.
  void release(const std::optional<std::filesystem::path>& file = std::nullopt);
  /// Takes the memory again and goes on where release() left off, bit for bit; weights that the program wrote meanwhile
  /// are trained from. Without a release() before it, it changes nothing. Throws: OutOfMemory, FileError: the engine
  /// stays released.
  void restore();

  /// Writes a checkpoint of everything that a bit-equal resume needs to `root`/step-N (N updates): masters, optimizer
  /// states, step counters, loss scale, W0, group numbers, buffers, frozen parameters that were written, random number
  /// generators, and what the program gives. By parameter, so that any placement, chunk size, thread count and
  /// precision resumes it. Complete or not there at all, whatever ends the process. One tensor is in memory beside the
  /// states. On all ranks, into one file system: each writes a part. Returns its folder. Blocks. Throws: StateError
  /// inside a step; FileError: then what was there before is unchanged.
  std::filesystem::path save(const std::filesystem::path& root, const CheckpointOptions& options = {});
  /// Goes on from a checkpoint, or from the newest in a folder of them; returns what the program gave to save(). On all
  /// ranks, however many wrote it; each reads what it keeps. The
  /// module and the optimizer must be those that were saved. Random numbers of a device go on there only where it is of
  /// the same kind. Blocks. Throws: FileError naming what is missing, damaged or different: then nothing has changed;
  /// StateError inside a step. What `progress` throws, or a device that fails, ends the engine.
  std::string load(const std::filesystem::path& checkpoint, const CheckpointLoadOptions& options = {});

  int rank() const;
  int rank_count() const;
  /// The mean of the ranks' values, each of a weight, on every rank: for the loss in a log. Zero where all weights are.
  /// On all ranks.
  double mean_over_ranks(double value, double weight);
  /// Whether all ranks say so: whether each has another batch, say. On all ranks.
  bool all_ranks(bool mine);

  const Config& config() const;
  EngineSummary summary() const;
  /// What a tier holds now. Throws: InvalidArgument for a tier that the machine has not.
  MemoryUsage memory_in_use(Tier tier) const;
  /// Writes the timeline kept so far for Perfetto or Chrome. Throws: FileError.
  void write_trace(const std::filesystem::path& file) const;

 private:
  struct Impl;
  friend class BlockScope;

  /// Awaits a block at its begin and takes its time at its end.
  class BlockScope {
   public:
    BlockScope(Engine& engine, const torch::nn::Module& block, std::int64_t rows)
        : engine_(engine), index_(engine.enter_block(block, rows)) {}
    ~BlockScope() { engine_.leave_block(index_); }
    BlockScope(const BlockScope&) = delete;
    BlockScope& operator=(const BlockScope&) = delete;

   private:
    Engine& engine_;
    const std::int64_t index_;
  };

  template <class BlockType>
  static auto& dereference(BlockType& block) {
    if constexpr (requires { *block; }) {
      return *block;
    } else {
      return block;
    }
  }

  /// Rows that a block multiplies its matrices with (tokens): what the modelled compute rate of an emulated device
  /// needs.
  static std::int64_t rows_of(const torch::Tensor& tensor);
  template <class First, class... Rest>
  static std::int64_t rows_of(const First& first, const Rest&... rest) {
    if constexpr (std::is_same_v<First, torch::Tensor>) {
      return rows_of(static_cast<const torch::Tensor&>(first));
    } else if constexpr (sizeof...(rest) > 0) {
      return rows_of(rest...);
    } else {
      return 0;
    }
  }
  static std::int64_t rows_of() { return 0; }

  std::string load_checked(const std::filesystem::path& path, const CheckpointLoadOptions& options);
  void add_backward(const torch::Tensor& loss, const BackwardOptions& options);
  StepResult take_step();
  bool recomputes(const CallOptions& options) const;
  [[noreturn]] static void refuse_recompute(const torch::nn::Module& block);
  [[noreturn]] static void refuse_tensors_inside(const torch::nn::Module& block);
  std::vector<torch::Tensor> call_recomputed(torch::nn::Module& block, BlockForward forward,
                                             std::vector<torch::Tensor> inputs, std::int64_t rows);
  std::int64_t enter_block(const torch::nn::Module& block, std::int64_t rows);
  void leave_block(std::int64_t index) noexcept;

  std::unique_ptr<Impl> impl_;
};

/// The bytes of every tier that a run of `model` with `config` would hold, activations only where `options` has them;
/// nothing is allocated. Throws: as Engine for what is not supported; never OutOfMemory.
MemoryPlan plan_memory(const torch::nn::Module& model, const Config& config, const EngineOptions& options = {});

}  // namespace spillway
