// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/core/log.h"
#include "spillway/core/trace.h"
#include "spillway/core/units.h"
#include "spillway/lane/lane.h"
#include "spillway/models/causal_lm.h"
#include "spillway/state/chunk_store.h"
#include "spillway/train/device_scope.h"

namespace spillway {

/// What only programs set, beside the configuration.
struct EngineOptions {
  std::int64_t trace_events = 0;  // spans kept for write_trace(); 0: totals only
  OpDelay delay = {};             // called around every op of every lane: for tests of races
  LogHandler log = {};            // where messages go; empty: spdlog, on standard error
};

struct BackwardOptions {
  /// This micro-batch's share of the step: usually its number of valid targets. A micro-batch of weight 0 contributes
  /// nothing, not even a NaN.
  double weight = 1;
  /// No other micro-batch follows in this step. Not given: decided by Config::accumulation. A hint for overlap: a
  /// backward after the last is added all the same.
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
/// After step(), new weights may still be on their way for blocks that went through call() in the last forward; call()
/// awaits them. Everything else is waited for inside step(). To read weights elsewhere: wait_parameters().
///
/// On the emulated device the thread that makes the engine allocates device memory until the engine is destroyed
/// (DeviceScope); data loaders use HostScope.
///
/// Owns: the parameters' memory while it lives; its destructor gives the module ordinary memory with the newest weights
/// back. The module must outlive it, and belong to one engine only.
/// Threads: all calls from the thread that made it, which is also where LibTorch must run backward on CPU.
class Engine {
 public:
  /// Blocks: until all states are in place.
  /// Throws: OutOfMemory before anything is moved when the plan does not fit, with the bytes missing and a schedule
  /// that would fit; InvalidArgument for a configuration or a parameter that is not supported, by name.
  Engine(torch::nn::Module& model, Config config, EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs block->forward(inputs...) once the block's newest parameters have arrived. `block`: a module holder, a
  /// shared_ptr to a module, or a module; its parameters() must be all it reads of this model.
  template <class BlockType, class... Inputs>
  auto call(BlockType& block, Inputs&&... inputs) {
    auto& module = dereference(block);
    const BlockScope scope(*this, module, rows_of(inputs...));
    return module.forward(std::forward<Inputs>(inputs)...);
  }

  /// The same as a value for models that take one (CausalLM is bound by the constructor).
  BlockCall block_call();

  /// Adds the gradients of weight x loss to the step. `loss`: one element, fp32 or fp64.
  /// Blocks: for the computation; for transfers only where staging slots are all in use.
  /// Throws: what LibTorch throws, OutOfMemory among it: then the whole step's gradients are forgotten, weights and
  /// states are as before, and the step may start again.
  void backward(const torch::Tensor& loss, BackwardOptions options = {});

  /// Updates the parameters with the gradients of all backwards since the last step.
  /// Blocks: until the norm is known and updates are under way.
  /// Parameters that the program wrote to since the last step (under no-grad) are taken as they are now.
  /// Throws: StateError without a backward before, for a parameter that was moved, converted or thawed, in fp16 when
  /// the loss scale cannot fall any further; the error of an op that failed: then the engine refuses all later calls.
  StepResult step();

  /// The learning rate of a group from the next step on (the schedule's factor still applies). Group 0: the optimizer's
  /// own; others in the order of Config::groups. Throws: InvalidArgument.
  void set_lr(double lr, std::size_t group = 0);

  /// Blocks: until all weights are those of the last step, on the device and everywhere.
  void wait_parameters();

  /// Copies of one parameter's state, in ordinary memory. `name`: as in named_parameters(). Blocks: as wait_parameters.
  /// Throws: InvalidArgument for an unknown name (with the nearest) or a parameter that is not trained.
  /// Shapes: the parameter's, fp32.
  torch::Tensor master(const std::string& name);
  /// The most exact value there is of a parameter: its master, or the working value of one that is not trained.
  torch::Tensor weight(const std::string& name);
  /// `k`: 0 the first moment, 1 the second.
  torch::Tensor optimizer_state(const std::string& name, std::int64_t k);
  /// How often the parameter was updated.
  std::int64_t updates(const std::string& name);

  const Config& config() const;
  EngineSummary summary() const;
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

  std::int64_t enter_block(const torch::nn::Module& block, std::int64_t rows);
  void leave_block(std::int64_t index) noexcept;

  std::unique_ptr<Impl> impl_;
};

/// The bytes of every tier that a run of `model` with `config` would hold, activations left out; nothing is allocated.
/// Throws: as Engine for what is not supported; never OutOfMemory.
MemoryPlan plan_memory(const torch::nn::Module& model, const Config& config);

}  // namespace spillway
