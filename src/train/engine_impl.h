// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "spillway/runtime/machine.h"
#include "spillway/runtime/runtime.h"
#include "spillway/state/loss_scaler.h"
#include "spillway/train/engine.h"
#include "train/engine_plan.h"
#include "train/parameters.h"
#include "train/torch_device.h"

namespace spillway {

/// A block that went through the gate.
struct GatedBlock {
  std::int64_t index = 0;
  std::vector<const void*> identities;  // of all its parameters
  TraceLabel label;
  std::vector<std::int64_t> parameters;  // trainable ones
  std::vector<std::int64_t> chunks;
  double elements = 0;
};

class StateFiles;
struct RecomputedCall;

/// Where states wait while an engine is released.
class ReleasedStates {
 public:
  /// In `file`, or in memory. Throws: FileError.
  explicit ReleasedStates(const std::optional<std::filesystem::path>& file);
  ~ReleasedStates();
  ReleasedStates(const ReleasedStates&) = delete;
  ReleasedStates& operator=(const ReleasedStates&) = delete;

  void save(const void* data, std::size_t bytes);
  /// Everything was saved: what follows is loaded in the same order from the start.
  void rewind();
  void load(void* data, std::size_t bytes);

 private:
  const std::optional<std::filesystem::path> file_;
  std::fstream stream_;
  std::vector<std::unique_ptr<std::byte[]>> pieces_;
  std::size_t next_ = 0;
};

/// A block's call that is going on.
struct OpenBlock {
  GatedBlock* block = nullptr;
  std::int64_t begin_ns = 0;
  std::int64_t rows = 0;
  std::unique_ptr<DeviceScope> memory;  // what the block makes counts for this engine
};

struct Engine::Impl {
  Impl(torch::nn::Module& model, Config config, EngineOptions options);
  ~Impl();

  void move_parameters();
  void set_hooks();
  /// Takes the hooks off and gives each parameter that lies in a pool ordinary memory.
  void give_back() noexcept;
  void forget_step();
  /// The same for a step that ends before its end: as if none of it had been.
  void undo_step();
  /// Throws: StateError after an op has failed.
  void check_usable() const;
  /// Reloads masters of parameters that the program wrote to. Throws: StateError for one that was replaced or thawed.
  void check_parameters();
  void on_gradient(std::int64_t parameter);
  void pace(double flops) noexcept { static_cast<void>(machine->compute().mark("pace", -1, flops)); }
  View working_place(std::size_t trainable) const;
  /// Puts a parameter into its place, from the module or from where the program keeps its weights. Returns its fp32
  /// values, or an undefined tensor where the place has them exactly.
  torch::Tensor move_in(ModelParameter& parameter, const View& place);
  template <class Visit>
  void for_frozen_places(const Visit& visit);
  void set_update_rules();
  /// Puts working parameters into the pools: of trained ones, masters are left as they are.
  void move_working_values();
  /// Gives every parameter that lies in a pool ordinary memory. Throws: OutOfMemory; then some are moved.
  void move_out();
  void check_thread() const;
  /// Throws: StateError where the engine is released or failed.
  void check_holds_states() const;
  void check_between_steps(const char* what) const;
  /// What ranks know of each other's micro-batch.
  struct MicroBatch {
    double weight = 0;        // of all ranks together
    double first_weight = 0;  // the first above zero, in rank order
    bool last = false;        // all say so
  };
  /// And in which order gradients will come: `own` is that of this rank's backward, empty where it has none.
  MicroBatch agree_micro_batch(double weight, bool last, const std::vector<std::int64_t>& own);
  /// The order of trained parameters' gradients in a backward from `loss`.
  std::vector<std::int64_t> order_of_gradients(const torch::Tensor& loss) const;
  std::vector<std::int64_t> with_earlier(std::vector<std::int64_t> order) const;
  void agree_order(const std::vector<std::int64_t>& own);
  std::vector<torch::Tensor> order_inside(const torch::nn::Module& block, const RecomputedCall& call,
                                          const std::vector<torch::Tensor>& inputs);
  /// Runs what all ranks do together: where it throws, the others are told, and the engine refuses all later calls.
  template <class Body>
  auto together(const Body& body);
  void fail_ranks(const char* why);
  /// Throws: StateError naming a parameter that has other values here than on rank 0.
  void check_same_weights(const std::vector<std::uint64_t>& checksums) const;
  /// Throws: StateError naming a rank whose settings differ from those of rank 0.
  void check_same_configuration() const;
  void note_checksum(const ModelParameter& parameter, const torch::Tensor& exact);
  /// What turns accumulated into true gradients.
  double grad_scale() const { return first_weight / (scaler.scale() * weight_sum); }
  /// What this rank writes of a checkpoint.
  std::vector<TensorSource> checkpoint_tensors();
  void add_state_tensors(std::size_t trainable, const std::string& role_name, StateRole role,
                         std::vector<TensorSource>& out);
  CheckpointManifest checkpoint_manifest(const std::string& program);
  std::vector<CheckpointFile> write_parts(const std::filesystem::path& aside, const CheckpointOptions& options);
  std::filesystem::path save_with_ranks(const std::filesystem::path& root, const CheckpointOptions& options);
  /// The models whose dropout checkpoints keep, and what it is called there.
  std::vector<std::pair<std::string, std::shared_ptr<CausalLM>>> dropout_states() const;
  /// Of the names of this rank's random number generators in checkpoints.
  std::string random_prefix() const;
  /// The ranks' texts, in rank order. Blocks: until all ranks have called.
  std::vector<std::string> gather_text(const char* what, const std::string& mine) const;
  /// All files are there, whole; with several ranks each looks at some.
  void check_files(const std::filesystem::path& folder, const CheckpointManifest& manifest, bool checksums);
  /// Throws: FileError naming the differences.
  void check_same_parameters(const CheckpointManifest& manifest, const std::string& where) const;
  std::uint64_t frozen_checksum(std::size_t frozen);
  /// Throws: FileError naming a frozen parameter that is another one than in the run that was saved.
  void check_same_frozen(const CheckpointManifest& manifest, const StateFiles& files, const std::string& where);
  /// What takes a checkpoint's tensors over. Throws: FileError for one that is missing or does not fit.
  std::vector<std::function<void()>> checkpoint_actions(StateFiles& files);
  /// A checkpoint that was found whole and fitting, and what takes it over.
  struct CheckedCheckpoint {
    std::filesystem::path folder;
    CheckpointManifest manifest;
    std::unique_ptr<StateFiles> files;
    std::vector<std::function<void()>> actions;
  };
  CheckedCheckpoint check_checkpoint(const std::filesystem::path& path, const CheckpointLoadOptions& options);
  /// With ranks: all find the same checkpoint, and none refuses it. Throws: FileError with what one of them says.
  CheckedCheckpoint check_together(const std::filesystem::path& path, const CheckpointLoadOptions& options);
  void take_checkpoint(const CheckedCheckpoint& checked, const CheckpointLoadOptions& options);
  void take_counters(const CheckpointManifest& manifest, bool take_hyperparameters);
  void count_uses(const torch::Tensor& loss);
  void flush_gradients();
  GatedBlock& gated_block(const torch::nn::Module& block);
  /// `loss` undefined: this rank has nothing to add, and takes part in what the others add.
  void run_backward(const torch::Tensor& loss, double seed, bool last);
  void set_learning_rates();
  StepResult finish_step(StepStatus status, double norm);
  /// Throws: StateError when the loss scale cannot fall any further.
  StepResult skip_not_finite(double norm);
  /// Says once which trained parameters had no gradient in the first update, `updated` being those that had.
  void list_unused(const std::vector<std::size_t>& updated) const;
  /// Awaits the updated weights that no gate will; the others' parameters are noted as being on their way.
  void wait_for_ungated_chunks(const std::vector<std::size_t>& updated);
  /// A parameter's weights have come. Throws: StateError where the program wrote to it before that.
  void note_landed(std::size_t trainable);
  /// All have. Throws: as note_landed, once all have come.
  void wait_landed();
  /// For calls that all ranks make where states are cut: none of them waits for one that throws here.
  void wait_landed_together();
  /// On the emulated device: where this thread's allocations count.
  std::unique_ptr<DeviceScope> count_memory() const;
  /// The most the device held: by the pools, and by LibTorch.
  Bytes device_peak() const { return machine->ledger(Tier::device)->peak() + torch_memory_peak(config.device); }
  void check_state_number(std::int64_t k) const;
  std::int64_t find_parameter(const std::string& name) const;
  torch::Tensor read(std::int64_t parameter, StateRole role);
  void write(std::int64_t parameter, StateRole role, const torch::Tensor& value);

  torch::nn::Module& module;
  const std::vector<std::shared_ptr<CausalLM>> causal_lms;  // in the module, or the module itself
  const Config config;
  const EngineOptions options;
  const std::vector<torch::Tensor> buffers;  // the module's
  Communicator* const ranks;                 // null: this one alone
  EnginePlan plan;
  std::vector<Hyperparameters> base_hyperparameters;  // a group's, before the learning-rate schedule
  LossScaler scaler;
  std::unique_ptr<Machine> machine;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Schedule> schedule;
  std::unique_ptr<DeviceScope> device_scope;

  const std::thread::id thread = std::this_thread::get_id();  // that may call

  // ---- the step that is going on
  bool in_backward = false;
  bool profiling = false;    // gradients are dropped
  bool recomputing = false;  // inside a second forward and its backward
  bool recomputed = false;   // a block was called with recompute since the engine was made
  /// Gradients of each parameter that are still to come in this backward, where blocks are recomputed.
  std::vector<std::int64_t> uses_left;
  std::int64_t micro_batches = 0;
  double weight_sum = 0;
  double first_weight_before = 0;  // W0 when the step began

  std::vector<std::uint64_t> weight_checksums;  // of each parameter's values when they were taken, where ranks compare
  // ---- what ranks agreed on
  std::vector<std::uint64_t> order_hashes;                                                 // of each rank's last order
  std::unordered_map<const torch::nn::Module*, std::vector<torch::Tensor>> orders_inside;  // of recomputed blocks

  // ---- the run
  std::unique_ptr<ReleasedStates> released;
  std::string failure;  // of an op: what later calls are refused with
  /// The checksum of each frozen parameter, and one more than the version it was computed of.
  std::vector<std::pair<std::int64_t, std::uint64_t>> frozen_checksums;
  std::vector<std::int64_t> frozen_versions;  // of frozen parameters when the engine was made
  std::vector<std::int64_t> versions;         // each parameter's version counter after the engine's last write
  double first_weight = 0;                    // W0: 0 until there was one
  std::int64_t updates = 0, skipped = 0, not_finite = 0;
  bool said_updates_wait = false;

  // ---- the gate
  std::unordered_map<const torch::nn::Module*, GatedBlock> blocks;
  std::vector<OpenBlock> open_blocks;
  std::vector<bool> gated;       // parameters whose block's training forward went through the gate since the last step
  std::vector<bool> on_its_way;  // parameters whose weights the next gate awaits
  std::vector<std::int64_t> rows;  // of each parameter's block when it last went through
  TraceTrack forward_track, engine_track;
  std::vector<const void*> known_parameters;  // of the module when the engine was made, in its order
};

template <class Body>
auto Engine::Impl::together(const Body& body) {
  if (ranks == nullptr) return body();
  try {
    return body();
  } catch (const std::exception& error) {
    fail_ranks(error.what());
    throw;
  }
}

}  // namespace spillway
