// SPDX-License-Identifier: Apache-2.0
//
// Fine-tunes (or trains from scratch) a Hugging Face causal language model whose states need not fit on the device.
//
//   finetune --model FOLDER --data train.bin --output out --steps 200 --device-memory 8GiB
//   finetune --init config.json --data rows.safetensors --output out --epochs 1 --preset resident
//   finetune --model FOLDER --data train.bin --output adapter --steps 200 --lora-rank 8
//
// Prints progress, writes one JSON object a step to --log, and leaves a Hugging Face folder in --output; with adapters
// a PEFT folder, or with --lora-merge a Hugging Face folder again.
#include "finetune.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/core/units.h"
#include "spillway/formats/token_file.h"
#include "spillway/models/causal_lm.h"
#include "spillway/models/generate.h"
#include "spillway/plan/run_plan.h"
#include "spillway/schedule/schedules.h"
#include "spillway/train/activations.h"
#include "spillway/train/data_loader.h"
#include "spillway/train/engine.h"
#include "spillway/train/metrics.h"

namespace {

using finetune::Options;
using spillway::Config;

constexpr const char* kExitCodes =
    "Exit codes: 0 done, 1 failed (a file that is damaged or missing, a full disk), 2 wrong usage, 3 does not fit in\n"
    "memory, 4 ended by a signal, with a checkpoint to resume from.";
constexpr int kFailed = 1, kUsage = 2, kDoesNotFit = 3, kInterrupted = 4;

volatile std::sig_atomic_t interrupted = 0;

/// The first signal lets the step end and saves; the second ends the process at once.
void end_after_this_step(int number) {
  interrupted = 1;
  std::signal(number, SIG_DFL);
}

std::string schedule_names() {
  std::string names;
  for (const spillway::ScheduleEntry& entry : spillway::schedules()) {
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
  }
  return names;
}

void add_model_and_data_flags(CLI::App& app, Options& o) {
  auto* model = app.add_option("--model", o.model, "Hugging Face folder to start from")->check(CLI::ExistingDirectory);
  app.add_option("--init", o.init, "config.json of a model to start from random weights")->excludes(model);
  app.add_option("--data", o.data, "training rows: .bin tokens or .safetensors (not needed by --dry-run)");
  auto* eval_data =
      app.add_option("--eval-data", o.eval_data, "held-out rows: evaluated before, after and every --eval-every steps");
  app.add_option("--eval-every", o.eval_every, "steps between evaluations; 0: only before and after")
      ->check(CLI::NonNegativeNumber)
      ->needs(eval_data);
  app.add_option("--eval-batches", o.eval_batches, "micro-batches of an evaluation; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--output", o.output, "folder for the trained model (Hugging Face format; not needed by --dry-run)");
  app.add_option("--batch-size", o.batch_size, "rows of a micro-batch, which ranks share")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seq-len", o.seq_len, "tokens of a row; needed for .bin data, else the file's")
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", o.seed, "of random weights, data order and dropout")->capture_default_str();
  app.add_flag("--no-shuffle", o.no_shuffle, "rows in the file's order");
  app.add_option("--save-every", o.save_every, "steps between checkpoints; 0: only when interrupted")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--keep", o.keep, "newest checkpoints to keep; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--checkpoints", o.checkpoints, "their folder [checkpoints in --output]");
  app.add_flag("--resume", o.resume, "go on from the newest checkpoint, or start where there is none");
  app.add_option("--log", o.log, "file for one JSON object a step");
  app.add_option("--trace", o.trace, "file for a timeline of all lanes (open it in ui.perfetto.dev)");
  app.add_option("--progress-every", o.progress_every, "steps between progress lines; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  auto* generate = app.add_option("--generate", o.generate, "tokens to generate at the end, the likeliest each time")
                       ->check(CLI::NonNegativeNumber);
  app.add_option("--prompt", o.prompt, "bytes to start generation from (models with a vocabulary of 256)")
      ->needs(generate);
  app.add_option("--temperature", o.temperature, "draw tokens from logits divided by this, from --seed [0: do not]")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-p", o.top_p, "of the likeliest tokens that together have this probability [1]")
      ->check(CLI::Range(1e-6, 1.0));
}

void add_training_flags(CLI::App& app, Options& o) {
  app.add_option("--steps", o.steps, "optimizer steps")->check(CLI::PositiveNumber);
  app.add_option("--epochs", o.epochs, "passes over the data, instead of --steps")
      ->check(CLI::PositiveNumber)
      ->excludes("--steps");
  app.add_option("--grad-accum", o.grad_accum, "micro-batches a step [1]")->check(CLI::PositiveNumber);
  app.add_option("--lr", o.lr, "learning rate [0.001]")->check(CLI::NonNegativeNumber);
  app.add_option("--lr-schedule", o.lr_schedule, "constant, linear or cosine [constant]")
      ->check(CLI::IsMember({"constant", "linear", "cosine"}));
  app.add_option("--min-lr-ratio", o.min_lr_ratio, "where linear and cosine end, relative to --lr [0]")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--warmup-steps", o.warmup_steps, "steps of linear warm-up")->check(CLI::NonNegativeNumber);
  app.add_option("--betas", o.betas, "AdamW's two decay rates [0.9,0.999]")->delimiter(',')->expected(2);
  app.add_option("--eps", o.eps, "AdamW's epsilon [1e-8]")->check(CLI::NonNegativeNumber);
  app.add_option("--weight-decay", o.weight_decay, "on parameters of two or more dimensions [0.01]")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip-norm", o.clip_norm, "limit of the global gradient norm; 0: off [0]")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--precision", o.precision, "fp32, bf16 or fp16, with fp32 masters in each [fp32]")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
}

void add_offload_flags(CLI::App& app, Options& o) {
  app.add_option("--offload", o.offload, "JSON configuration, Spillway's or DeepSpeed's; flags override it")
      ->check(CLI::ExistingFile);
  app.add_option("--preset", o.preset, "schedule: " + schedule_names() + " [zero_offload]");
  app.add_option("--device", o.device, "emulated, cuda or cuda:N [emulated]");
  app.add_option("--device-memory", o.device_memory, "capacity of the device, for example 64MiB");
  app.add_option("--host-memory", o.host_memory, "the most pinned memory to use, for example 16GiB");
  app.add_option("--link-bandwidth", o.link_bandwidth, "of the emulated device, each way, for example 12GB/s");
  app.add_option("--chunk-size", o.chunk_size, "elements moved and updated together, for example 256Ki");
  app.add_flag("--recompute", o.recompute, "compute activations again in backward instead of keeping them");
  app.add_flag("--low-memory-accumulation", o.low_memory_accumulation,
               "sum gradients in bf16 or fp16 instead of fp32: less memory, less exact");
  app.add_flag("--print-config", o.print_config,
               "print every key of the configuration in force, and which file or flag it came from, and end");
  app.add_flag("--dry-run", o.dry_run,
               "print what the run would hold, by tier and use, and end: needs --seq-len or --data, but no weights");
  app.add_option("--threads", o.threads, "of the CPU optimizer [half the cores]")->check(CLI::Range(0, 4096));
  app.add_option("--cores", o.cores, "processors its threads stay on, like 0-3,8, or any [chosen]");
  app.add_option("--instruction-set", o.instruction_set, "its kernels: baseline, avx2, avx512 [the fastest]");
}

/// One step: forward and backward of each micro-batch, then the update.
spillway::StepRecord train_step(spillway::CausalLM& model, spillway::Engine& engine, spillway::DataLoader& loader,
                                std::int64_t micro_batches) {
  const auto begin = std::chrono::steady_clock::now();
  const torch::Device device = model.parameters().front().device();
  spillway::StepRecord record;
  double loss_sum = 0;
  std::int64_t valid = 0, tokens = 0;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    const spillway::Batch whole = loader.next();
    const spillway::Batch batch = spillway::rows_of_rank(whole, engine.rank(), engine.rank_count());
    torch::Tensor loss;  // of a rank without rows: none
    if (batch.inputs.numel() > 0) {
      loss = spillway::next_token_loss(model.forward(batch.inputs.to(device), batch.documents),
                                       batch.targets.to(device), batch.valid_targets);
      loss_sum += loss.item<double>() * static_cast<double>(batch.valid_targets);
    }
    engine.backward(loss, {.weight = static_cast<double>(batch.valid_targets), .last = i + 1 == micro_batches});
    valid += batch.valid_targets;
    tokens += whole.inputs.numel();
  }
  record.result = engine.step();
  const auto weight = static_cast<double>(valid);
  const double mean = engine.mean_over_ranks(valid > 0 ? loss_sum / weight : 0, weight);
  record.loss = engine.all_ranks(valid == 0) ? std::nan("") : mean;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  record.tokens_per_second = static_cast<double>(tokens) / seconds.count();
  return record;
}

void print_progress(const spillway::StepRecord& r, std::int64_t steps) {
  std::printf("step %lld/%lld  loss %.4f  norm %.3f  lr %.2e  %.0f tokens/s  device peak %s%s\n",
              static_cast<long long>(r.result.step), static_cast<long long>(steps), r.loss, r.result.grad_norm,
              r.result.lr, r.tokens_per_second, spillway::to_string(r.result.device_peak).c_str(),
              r.result.status == spillway::StepStatus::updated ? "" : "  SKIPPED");
  std::fflush(stdout);
}

void print_evaluation(const char* when, spillway::CausalLM& model, const std::optional<spillway::TokenFile>& file,
                      const Options& o, spillway::Engine& engine) {
  if (!file) return;
  const double loss = spillway::evaluate(model, *file, o.batch_size, o.eval_batches, engine);
  std::printf("evaluation %s: loss %.4f, perplexity %.2f\n", when, loss, std::exp(loss));
  std::fflush(stdout);
}

void print_generation(spillway::CausalLM& model, const spillway::TokenFile& data, const Options& o) {
  if (o.generate == 0) return;
  const std::int64_t vocabulary = model.config().vocabulary;
  std::vector<std::int64_t> prompt(o.prompt.begin(), o.prompt.end());
  for (std::int64_t& token : prompt) token &= 0xFF;
  if (prompt.empty()) {  // the beginning of the data's first row
    std::vector<std::int64_t> inputs(static_cast<std::size_t>(data.length())), targets(inputs.size());
    data.read(0, vocabulary, inputs, targets);
    prompt.assign(inputs.begin(), inputs.begin() + std::min<std::int64_t>(16, data.length()));
  }
  const spillway::GenerateOptions options{
      .max_new_tokens = o.generate, .temperature = o.temperature, .top_p = o.top_p, .seed = o.seed};
  const auto tokens = spillway::generate(model, prompt, options);
  std::printf("generated%s from %zu tokens:\n----\n", o.temperature == 0 ? " greedily" : "", prompt.size());
  for (std::int64_t token : tokens) {
    if (vocabulary > 256) {
      std::printf("%lld ", static_cast<long long>(token));
    } else {
      const auto byte = static_cast<unsigned char>(token);
      std::putchar(byte == '\n' || byte == '\t' || (byte >= 32 && byte < 127) ? byte : '?');
    }
  }
  std::printf("\n----\n");
}

/// Before hours of training, not after: whether what is written at the end can be.
void probe_outputs(const Options& o) {
  if (o.launch.rank > 0) return;  // the first rank writes
  std::error_code error;
  std::filesystem::create_directories(o.output, error);
  const std::filesystem::path probe = std::filesystem::path(o.output) / ".spillway_probe";
  std::filesystem::remove(probe, error);  // a link is removed, never written through
  const int file = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  const bool writable = file >= 0 && ::write(file, "x", 1) == 1;
  if (file >= 0) ::close(file);
  std::filesystem::remove(probe, error);
  if (!writable) throw spillway::FileError("--output " + o.output + ": cannot write there");
  if (!o.trace.empty() && !std::ofstream(o.trace, std::ios::app)) {
    throw spillway::FileError("--trace " + o.trace + ": cannot write there");
  }
}

spillway::ModelConfig load_shape(const Options& o) {
  spillway::require(!o.model.empty() || !o.init.empty(), "one of --model and --init is needed");
  return spillway::ModelConfig::load(o.init.empty() ? std::filesystem::path(o.model) / "config.json"
                                                    : std::filesystem::path(o.init));
}

int dry_run(const Options& o) {
  const spillway::ModelConfig shape = load_shape(o);
  std::int64_t length = o.seq_len, rows = o.batch_size, steps = 0;
  if (!o.data.empty()) {
    const spillway::TokenFile data(o.data, o.seq_len);
    length = data.length();
    rows = data.rows();
  }
  spillway::require(length > 0, "--dry-run needs --seq-len, or --data whose rows have a length");
  // Where neither says how many steps there are: as many as any warm-up needs, since memory does not depend on it.
  if (o.data.empty() && o.steps == 0) rows = std::int64_t{1} << 40;
  return finetune::print_dry_run(shape, finetune::make_config(o, rows, steps).config, o, length);
}

void check_inputs(const Options& o, const spillway::TokenFile& data,
                  const std::optional<spillway::TokenFile>& eval_data, std::int64_t vocabulary) {
  finetune::check_prompt(o, vocabulary);
  if (o.launch.rank > 0) return;  // the others end with it
  finetune::check_tokens(data, vocabulary);
  if (eval_data) finetune::check_tokens(*eval_data, vocabulary);
}

// Epochs are counted in rows: the steps so far may have had another number of them.
std::int64_t steps_left(const Options& o, const spillway::DataLoader& loader, std::int64_t micro_batches) {
  const double left = o.epochs * static_cast<double>(loader.rows()) - static_cast<double>(loader.position());
  const auto rows_a_step = static_cast<double>(o.batch_size * micro_batches);
  return std::max<std::int64_t>(0, std::llround(std::ceil(left / rows_a_step)));
}

void print_job(const spillway::CausalLM& model, const spillway::DataLoader& loader, std::int64_t length,
               std::int64_t steps, const Config& config, const Options& o) {
  std::printf("training %s: %lld rows of %lld tokens, %lld steps of %lld x %lld rows, schedule %s\n",
              std::string(to_string(model.config().family)).c_str(), static_cast<long long>(loader.rows()),
              static_cast<long long>(length), static_cast<long long>(steps),
              static_cast<long long>(config.accumulation), static_cast<long long>(o.batch_size),
              config.schedule.c_str());
}

// What was trained is not lost with an output that cannot be written.
void evaluate_and_save(spillway::CausalLM& model, const std::optional<spillway::TokenFile>& eval_data, const Options& o,
                       spillway::Engine& engine, finetune::Checkpoints& checkpoints, std::int64_t steps) {
  engine.wait_parameters();
  try {
    print_evaluation("after training", model, eval_data, o, engine);
    finetune::save_trained(model, engine, o, o.launch.rank == 0);
  } catch (...) {
    if (engine.rank_count() == 1) checkpoints.rescue(steps);  // others may not come to a save any more
    throw;
  }
}

int run(const Options& o) {
  finetune::check_lora_flags(o);
  if (o.dry_run) return dry_run(o);
  spillway::require(!o.data.empty() && !o.output.empty(), "--data and --output are needed (all but --dry-run)");
  const spillway::ModelConfig shape = load_shape(o);
  at::globalContext().setDeterministicAlgorithms(true, false);
  torch::manual_seed(o.seed);

  const spillway::TokenFile data(o.data, o.seq_len);
  std::optional<spillway::TokenFile> eval_data;
  if (!o.eval_data.empty()) eval_data.emplace(o.eval_data, data.length());
  std::int64_t steps = 0;
  Config config = finetune::make_config(o, data.rows(), steps).config;
  const finetune::Ranks joined = finetune::join_ranks(o, config);
  spillway::Communicator* const ranks = joined.communicator.get();
  // Before weights are read and outputs are made: whether it fits.
  const spillway::Bytes activations = finetune::activations_of(shape, config, o, data.length());
  spillway::check_fits(spillway::plan_run(spillway::planned_parameters(shape, config, finetune::lora_options(o.lora)),
                                          config, activations, finetune::place_of(o, ranks)),
                       config);
  probe_outputs(o);
  finetune::require_checkpoints_of_its_own(o);
  check_inputs(o, data, eval_data, shape.vocabulary);
  // A folder's weights go straight to where the engine keeps them, one tensor at a time.
  const bool from_folder = o.init.empty();
  const auto model = from_folder ? spillway::empty_causal_lm(shape) : spillway::make_causal_lm(shape, o.seed);
  spillway::EngineOptions engine_options;
  engine_options.trace_events = o.trace.empty() ? 0 : 1 << 20;
  engine_options.activations = activations;
  engine_options.communicator = ranks;
  engine_options.log = finetune::rank_log(ranks);
  if (from_folder) engine_options.weights = spillway::folder_weights(*model, o.model);
  model->set_dropout_seed(o.seed + static_cast<std::uint64_t>(o.launch.rank));  // other masks for other rows
  finetune::add_adapters(*model, o);
  spillway::Engine engine(*model, config, engine_options);
  spillway::DataLoader loader(data, model->config().vocabulary, {o.batch_size, !o.no_shuffle, o.seed});
  finetune::Checkpoints checkpoints(o, engine, data, loader);
  const std::int64_t done = checkpoints.resume();
  if (done > 0 && o.epochs > 0) steps = done + steps_left(o, loader, config.accumulation);
  spillway::MetricsLog log(o.launch.rank == 0 ? o.log : "", done);
  print_job(*model, loader, data.length(), steps, config, o);

  if (done == 0) print_evaluation("before training", *model, eval_data, o, engine);
  model->train();
  for (const int number : {SIGINT, SIGTERM}) std::signal(number, end_after_this_step);
  if (done >= steps && done > 0)
    std::printf("nothing is left to train: %lld steps were done\n", static_cast<long long>(done));
  for (std::int64_t step = done + 1; step <= steps; ++step) {
    const spillway::StepRecord record = train_step(*model, engine, loader, config.accumulation);
    log.write(record);
    if (o.progress_every > 0 && (step % o.progress_every == 0 || step == 1 || step == steps))
      print_progress(record, steps);
    const bool stop = !engine.all_ranks(interrupted == 0);  // a signal may reach one of them
    checkpoints.save(step, stop);
    if (stop && step < steps) {
      std::printf("interrupted after step %lld: go on with --resume\n", static_cast<long long>(step));
      return kInterrupted;
    }
    if (o.eval_every > 0 && step % o.eval_every == 0 && step != steps)
      print_evaluation("so far", *model, eval_data, o, engine);
  }
  evaluate_and_save(*model, eval_data, o, engine, checkpoints, steps);
  if (o.launch.rank > 0) return 0;
  print_generation(*model, eval_data ? *eval_data : data, o);
  std::printf("%s", spillway::describe(engine.summary()).c_str());
  if (!o.trace.empty()) engine.write_trace(o.trace);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Fine-tunes a causal language model whose states need not fit on the device.");
  app.footer(kExitCodes);
  add_model_and_data_flags(app, options);
  add_training_flags(app, options);
  add_offload_flags(app, options);
  finetune::add_lora_flags(app, options.lora);
  finetune::add_rank_flags(app, options);
  try {
    app.parse(argc, argv);
    options.launch = spillway::read_launch(spillway::launch_variables());
    finetune::read_offload_file(app, options);
    if (options.print_config) return finetune::print_config(options);
    return run(options);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kUsage;
  } catch (const spillway::OutOfMemory& error) {
    std::fprintf(stderr, "finetune: does not fit: %s\n", error.what());
    return kDoesNotFit;
  } catch (const c10::OutOfMemoryError& error) {  // of LibTorch's own allocator on a GPU
    std::fprintf(stderr, "finetune: does not fit: %s\n", error.what_without_backtrace());
    return kDoesNotFit;
  } catch (const spillway::InvalidArgument& error) {
    std::fprintf(stderr, "finetune: %s\n", error.what());
    return kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "finetune: %s\n", error.what());
    return kFailed;
  }
}
