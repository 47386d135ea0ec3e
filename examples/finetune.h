// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spillway/comm/communicator.h"
#include "spillway/comm/launch.h"
#include "spillway/comm/store.h"
#include "spillway/core/config.h"
#include "spillway/core/config_file.h"
#include "spillway/core/units.h"
#include "spillway/plan/run_plan.h"
#include "spillway/state/lora_options.h"
#include "spillway/state/model_config.h"
#include "spillway/train/data_loader.h"
#include "spillway/train/engine.h"

namespace CLI {
class App;
}
namespace spillway {
class CausalLM;
class Engine;
}  // namespace spillway

namespace finetune {

struct LoraFlags {
  std::int64_t rank = 0;
  std::optional<double> alpha;
  double dropout = 0;
  std::vector<std::string> targets;
  std::string adapter;
  bool merge = false;

  bool any() const { return rank > 0 || !adapter.empty(); }
};

/// The command line, as given.
struct Options {
  std::string model, init, data, eval_data, output, offload, log, trace;
  std::string device_memory, link_bandwidth, host_memory, chunk_size, precision, preset, device, prompt;
  std::string cores, instruction_set;
  std::string lr_schedule;
  std::vector<double> betas;
  std::optional<double> lr, eps, weight_decay, clip_norm;
  std::optional<int> threads, stage;
  std::optional<std::int64_t> bucket_chunks;
  int ranks = 0;  // to plan for
  bool transport_sums = false, reduce_last_only = false;
  double rank_timeout = 600;
  std::optional<std::int64_t> grad_accum, warmup_steps;
  std::optional<double> min_lr_ratio;
  std::int64_t batch_size = 8, seq_len = 0, steps = 0;
  std::int64_t eval_every = 0, eval_batches = 32, generate = 0, progress_every = 10;
  double epochs = 0, temperature = 0, top_p = 1;
  std::uint64_t seed = 0;
  std::string checkpoints;
  std::int64_t save_every = 0, keep = 2;
  bool resume = false;
  bool no_shuffle = false, recompute = false, low_memory_accumulation = false, dry_run = false;
  bool print_config = false;
  LoraFlags lora;
  spillway::LoadedConfig file;  // of --offload
  std::string batch_size_origin;
  spillway::Launch launch;  // who started this process

  int rank_count() const { return ranks > 0 ? ranks : launch.size; }
  /// The most rows of a micro-batch that one rank computes.
  std::int64_t rank_rows() const { return (batch_size + rank_count() - 1) / rank_count(); }
};

/// Reads the file of --offload, if any: its size of a micro-batch stands where no flag gives one.
void read_offload_file(const CLI::App& app, Options& options);
/// The configuration of --offload with what the other flags say on top, and where each value came from.
spillway::LoadedConfig make_config(const Options& options, std::int64_t rows, std::int64_t& steps);
/// Prints that.
int print_config(const Options& options);

void add_lora_flags(CLI::App& app, LoraFlags& flags);
/// Throws: InvalidArgument where the flags do not go together.
void check_lora_flags(const Options& options);
/// What the flags ask for; empty where they ask for no adapters.
std::optional<spillway::LoraOptions> lora_options(const LoraFlags& flags);
/// Adds what the flags ask for: new adapters, or saved ones.
void add_adapters(spillway::CausalLM& model, const Options& options);
/// Saves the adapters, or the whole model where there are none or they are merged.
/// On all ranks; the first writes.
void save_trained(const spillway::CausalLM& model, spillway::Engine& engine, const Options& options, bool write);

void add_rank_flags(CLI::App& app, Options& options);
/// The ranks that a launcher started this process with; nothing where there is one.
struct Ranks {
  std::unique_ptr<spillway::Store> store;  // what GPUs meet through: outlives the communicator
  std::unique_ptr<spillway::Communicator> communicator;
};
/// Puts `config` right for this rank (its GPU). Standard output of all but the first goes nowhere. Throws:
/// InvalidArgument, RankError.
Ranks join_ranks(const Options& options, spillway::Config& config);
/// Messages of the engine: those of the first rank, and every rank's errors.
spillway::LogHandler rank_log(const spillway::Communicator* ranks);
/// Who is planned for: these ranks, or the --ranks of a dry run.
spillway::RankPlace place_of(const Options& options, const spillway::Communicator* ranks);

/// What a run holds on the device beside its states, known from the model's shape alone: training, and evaluation and
/// generation where asked for. `length`: tokens of a row.
spillway::Bytes activations_of(const spillway::ModelConfig& shape, const spillway::Config& config,
                               const Options& options, std::int64_t length);

/// Prints the plan of the run and, beside it, what every other schedule would hold. Throws: OutOfMemory, after
/// printing, when the run does not fit.
int print_dry_run(const spillway::ModelConfig& shape, const spillway::Config& config, const Options& options,
                  std::int64_t length);

/// The checkpoints of a run: saves where asked, and goes on from the newest.
/// Owns: nothing; all must outlive it.
class Checkpoints {
 public:
  /// `data`: what the loader reads.
  Checkpoints(const Options& options, spillway::Engine& engine, const spillway::TokenFile& data,
              spillway::DataLoader& loader);
  /// With --resume: loads the newest checkpoint and takes the data up where it stood. Returns the steps done so far,
  /// skipped ones counted; 0 where there was nothing to resume. Throws: InvalidArgument where the data is another.
  std::int64_t resume();
  /// Saves after step number `step` where that is due. `now`: in any case.
  void save(std::int64_t step, bool now);
  /// Where the run's output cannot be written: saves what was trained, and says where it is, or why not.
  void rescue(std::int64_t step) noexcept;

 private:
  std::string position(std::int64_t step) const;

  const Options& options_;
  spillway::Engine& engine_;
  spillway::DataLoader& loader_;
  const std::uint64_t data_checksum_;  // of the rows that are trained on: their file may be replaced meanwhile
  std::filesystem::path folder_;
  std::int64_t saved_ = -1;
};

/// Without --resume: that no other run's checkpoints are where this one's would go. Those would be taken for this
/// run's, and removed in its favour. Throws: InvalidArgument naming the folder.
void require_checkpoints_of_its_own(const Options& options);

/// Before hours of training: that all tokens are in the vocabulary. Throws: FileError naming the row.
void check_tokens(const spillway::TokenFile& data, std::int64_t vocabulary);
/// And that a prompt's bytes are. Throws: InvalidArgument.
void check_prompt(const Options& options, std::int64_t vocabulary);

}  // namespace finetune
