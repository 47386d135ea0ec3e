// SPDX-License-Identifier: Apache-2.0
//
// finetune --lora-...: adapters on a frozen model.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "finetune.h"
#include "spillway/core/error.h"
#include "spillway/models/lora.h"
#include "spillway/train/device_scope.h"
#include "spillway/train/engine.h"

namespace finetune {

void add_lora_flags(CLI::App& app, LoraFlags& o) {
  auto* rank = app.add_option("--lora-rank", o.rank, "train adapters of this rank, the model itself frozen; 0: off")
                   ->check(CLI::NonNegativeNumber);
  app.add_option("--lora-alpha", o.alpha, "adapters are scaled by alpha / rank [the rank]")
      ->check(CLI::PositiveNumber)
      ->needs(rank);
  app.add_option("--lora-dropout", o.dropout, "of what adapters read")->check(CLI::Range(0.0, 1.0))->needs(rank);
  app.add_option("--lora-targets", o.targets,
                 "adapted layers: names, their ends, patterns, or all-linear [q_proj,v_proj; gpt2: c_attn]")
      ->delimiter(',')
      ->needs(rank);
  app.add_option("--lora-adapter", o.adapter, "PEFT folder of adapters to go on from")
      ->check(CLI::ExistingDirectory)
      ->excludes(rank);
  app.add_flag("--lora-merge", o.merge, "save the model with its adapters merged, instead of the adapters");
}

void check_lora_flags(const Options& o) {
  spillway::require(!o.lora.merge || o.lora.any(), "--lora-merge needs adapters: --lora-rank or --lora-adapter");
  spillway::require(!o.lora.any() || !o.model.empty() || o.lora.merge || o.dry_run,
                    "adapters are of no use without their base: give --model, or --lora-merge beside --init");
}

std::optional<spillway::LoraOptions> lora_options(const LoraFlags& o) {
  if (!o.adapter.empty()) return spillway::LoraOptions::load(o.adapter);
  if (o.rank == 0) return std::nullopt;
  return spillway::LoraOptions{.rank = o.rank,
                               .alpha = o.alpha.value_or(static_cast<double>(o.rank)),
                               .dropout = o.dropout,
                               .targets = o.targets};
}

void add_adapters(spillway::CausalLM& model, const Options& o) {
  if (!o.lora.adapter.empty()) {
    spillway::load_lora(model, o.lora.adapter);
  } else if (const auto options = lora_options(o.lora)) {
    spillway::add_lora(model, *options, o.seed);
  }
}

void save_trained(const spillway::CausalLM& model, spillway::Engine& engine, const Options& o, bool write) {
  const spillway::HostScope host;  // what is merged on the way is not the device's affair
  const auto weights = [&](const std::string& name) { return engine.weight(name); };
  const bool adapters = o.lora.any() && !o.lora.merge;
  if (adapters) {
    spillway::save_lora(model, o.output,
                        {.base_model = o.model, .dtype = spillway::DType::f32, .weights = weights, .write = write});
  } else {
    const spillway::DType dtype = engine.config().precision;
    spillway::save_causal_lm(
        model, o.output,
        {.source_folder = o.model, .dtype = dtype, .weights = weights, .merge_lora = o.lora.merge, .write = write});
  }
  std::printf("saved%s to %s\n", adapters ? " the adapters" : "", o.output.c_str());
}

}  // namespace finetune
