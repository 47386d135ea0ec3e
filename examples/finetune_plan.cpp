// SPDX-License-Identifier: Apache-2.0
//
// finetune --dry-run: what a run would hold, without its weights.
#include <algorithm>
#include <cstdio>

#include "finetune.h"
#include "spillway/models/lora.h"
#include "spillway/plan/run_plan.h"
#include "spillway/train/activations.h"

namespace finetune {

using spillway::Config;

spillway::Bytes activations_of(const spillway::ModelConfig& shape, const Config& config, const Options& o,
                               std::int64_t length) {
  const auto model = spillway::meta_causal_lm(shape, config.precision);
  if (const auto options = lora_options(o.lora)) spillway::add_lora(*model, *options, o.seed);
  const auto batch_of = [&](const std::string& file) {
    return spillway::BatchShape{o.rank_rows(), length,
                                !file.empty() && spillway::TokenFile(file, length).has_documents()};
  };
  spillway::Bytes most = spillway::profile_activations(*model, config, batch_of(o.data));
  if (!o.eval_data.empty()) most = std::max(most, spillway::profile_evaluation(*model, batch_of(o.eval_data)));
  if (o.generate > 0) {
    const auto prompt = static_cast<std::int64_t>(o.prompt.empty() ? 16 : o.prompt.size());
    most = std::max(most, spillway::profile_generation(*model, prompt, o.generate));
  }
  return most;
}

int print_dry_run(const spillway::ModelConfig& shape, const Config& config, const Options& o, std::int64_t length) {
  const auto parameters = spillway::planned_parameters(shape, config, lora_options(o.lora));
  const spillway::RankPlace place = place_of(o, nullptr);
  const spillway::RunPlan plan =
      spillway::plan_run(parameters, config, activations_of(shape, config, o, length), place);
  std::printf("%s, %s, %lld x %lld tokens a micro-batch, schedule %s, %zu chunks of %lld elements\n",
              std::string(to_string(shape.family)).c_str(), std::string(to_string(config.precision)).c_str(),
              static_cast<long long>(o.batch_size), static_cast<long long>(length), config.schedule.c_str(),
              plan.layout->chunks().size(), static_cast<long long>(plan.layout->chunk_elements()));
  if (place.ranks > 1)
    std::printf("rank %d of %d, which share states at stage %d\n", place.rank, place.ranks, config.stage);
  std::printf("%s\nother plans                      device     pinned\n", spillway::describe(plan.memory).c_str());
  for (const spillway::ScheduleEntry& entry : spillway::schedules()) {
    for (bool recompute : {false, true}) {
      Config other = config;
      other.schedule = entry.name;
      other.recompute = recompute;
      const auto memory = spillway::plan_run(parameters, other, activations_of(shape, other, o, length), place).memory;
      std::printf("  %-13s %-13s %9s  %9s\n", other.schedule.c_str(), recompute ? "recompute" : "",
                  spillway::to_string(memory[spillway::Tier::device].total()).c_str(),
                  spillway::to_string(memory[spillway::Tier::pinned].total()).c_str());
    }
  }
  spillway::check_fits(plan, config);
  const bool limited = config.device.memory || config.host_memory;
  std::printf("%s\n", limited ? "The run fits." : "No capacity was given (--device-memory, --host-memory).");
  return 0;
}

}  // namespace finetune
