// SPDX-License-Identifier: Apache-2.0
#include "spillway/plan/run_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/core/pattern.h"

namespace spillway {
namespace {

std::int64_t padded_to_grain(std::int64_t elements) {
  return (elements + kGrainElements - 1) / kGrainElements * kGrainElements;
}

std::unique_ptr<Layout> make_layout(std::vector<ParameterInfo> trainable, const Config& config,
                                    const Partition& partition) {
  std::int64_t total = 0;
  for (const ParameterInfo& info : trainable) total += padded_to_grain(info.numel());
  const std::int64_t wanted = config.chunk_elements > 0 ? config.chunk_elements : default_chunk_elements(total);
  // Staging slots are as large as a chunk: one larger than the model would only waste memory.
  return std::make_unique<Layout>(std::move(trainable), std::min(wanted, std::max(total, kGrainElements)), partition);
}

StateSpec make_spec(const Layout& layout, std::int64_t frozen_elements, const ScheduleEntry& schedule,
                    const Config& config) {
  StateSpec spec;
  spec.working = config.precision;
  spec.gradient = config.gradient_type();
  spec.placement.assign(layout.chunks().size(), schedule.placement);
  // More slots than chunks would never be used.
  const auto slots = std::min<std::int64_t>(config.staging_slots, static_cast<std::int64_t>(layout.chunks().size()));
  if (schedule.stages) {
    spec.device_slots = spec.pinned_slots = slots;
    if (config.precision != DType::f32) spec.upload_slots = slots;
  }
  if (layout.partition().shared()) {
    spec.device_slots = spec.reduce_slots = slots;
    spec.bucket_chunks = config.bucket_chunks;
    spec.transport_sums = config.transport_sums;
    spec.reduce_last = config.reduce_last_only;
    if (spec.reduce_last) {  // gradients are added up where they are kept before they are sent
      spec.device_slots = schedule.stages ? slots : 0;
      spec.piece_slots = schedule.stages ? slots : 0;
    }
    spec.bucket_chunks = std::min(spec.bucket_chunks, std::max<std::int64_t>(1, slots));
  }
  spec.frozen_elements = frozen_elements;
  spec.host_reads_device = config.device.kind == DeviceConfig::Kind::emulated;
  return spec;
}

MemoryPlan plan_memory(const Layout& layout, const StateSpec& spec, Bytes activations) {
  MemoryPlan memory = plan_state(layout, spec);
  memory[Tier::device][MemoryUse::activations] = activations;
  return memory;
}

std::optional<Bytes> capacity_of(Tier tier, const Config& config, const RankPlace& place) {
  if (tier == Tier::device) return config.device.memory;
  if (tier == Tier::pinned && config.host_memory) return Bytes{config.host_memory->value / place.local_ranks};
  return std::nullopt;
}

bool fits(const MemoryPlan& memory, const Config& config, const RankPlace& place) {
  for (Tier tier : {Tier::device, Tier::pinned}) {
    const std::optional<Bytes> capacity = capacity_of(tier, config, place);
    if (capacity && memory[tier].total() > *capacity) return false;
  }
  return true;
}

// The first other schedule that fits, in words.
std::string alternative(const RunPlan& plan, const Config& config) {
  for (const ScheduleEntry& entry : schedules()) {
    if (&entry == plan.schedule) continue;
    const MemoryPlan memory =
        plan_memory(*plan.layout, make_spec(*plan.layout, plan.spec.frozen_elements, entry, config),
                    plan.memory[Tier::device][MemoryUse::activations]);
    if (!fits(memory, config, plan.place)) continue;
    return fmt::format("; schedule {} would fit, with {} on the device and {} pinned", entry.name,
                       to_string(memory[Tier::device].total()), to_string(memory[Tier::pinned].total()));
  }
  const bool activations = plan.memory[Tier::device][MemoryUse::activations].value > 0;
  return fmt::format(
      "; no other schedule fits either: a larger capacity, a smaller model, {}or smaller chunks are "
      "needed",
      activations && !config.recompute ? "a smaller micro-batch, recompute " : "");
}

}  // namespace

int group_of(const std::string& name, std::int64_t dims, const Config& config) {
  for (std::size_t i = 0; i < config.groups.size(); ++i) {
    const GroupConfig& group = config.groups[i];
    if (group.max_dims && dims > *group.max_dims) continue;
    if (matches(group.match, name)) return static_cast<int>(i) + 1;
  }
  return 0;
}

RunPlan plan_run(std::span<const PlannedParameter> parameters, const Config& config, std::optional<Bytes> activations,
                 const RankPlace& place) {
  config.validate();
  check(place.local_ranks >= 1, "a host has a rank at least");
  RunPlan plan;
  plan.place = place;
  plan.schedule = &find_schedule(config.schedule);
  std::vector<ParameterInfo> trainable;
  std::int64_t frozen_elements = 0;
  for (const PlannedParameter& parameter : parameters) {
    if (parameter.trainable) {
      trainable.push_back(parameter.info);
    } else {
      frozen_elements += padded_to_grain(parameter.info.numel());
    }
  }
  plan.layout = make_layout(std::move(trainable), config, {place.ranks, place.rank, config.stage});
  plan.spec = make_spec(*plan.layout, frozen_elements, *plan.schedule, config);
  plan.memory = plan_memory(*plan.layout, plan.spec, activations.value_or(Bytes{0}));
  return plan;
}

void check_fits(const RunPlan& plan, const Config& config) {
  const bool activations = plan.memory[Tier::device][MemoryUse::activations].value > 0;
  for (Tier tier : {Tier::device, Tier::pinned}) {
    const std::optional<Bytes> capacity = capacity_of(tier, config, plan.place);
    const Bytes needed = plan.memory[tier].total();
    if (!capacity || needed <= *capacity) continue;
    throw OutOfMemory(
        fmt::format("schedule {} needs {} of {} memory{} ({}), but there are {}: {} ({} bytes) are missing{}",
                    plan.schedule->name, to_string(needed), to_string(tier),
                    activations || tier != Tier::device ? "" : " before any activation", to_string(plan.memory[tier]),
                    to_string(*capacity), to_string(needed - *capacity), (needed - *capacity).value,
                    alternative(plan, config)),
        needed.value, (needed - *capacity).value);
  }
}

std::vector<PlannedParameter> planned_parameters(const ModelConfig& model, const Config& config,
                                                 const std::optional<LoraOptions>& lora) {
  std::vector<PlannedParameter> out;
  const auto add = [&](std::vector<ParameterShape> shapes, bool trainable) {
    for (ParameterShape& shape : shapes) {
      const int group = group_of(shape.name, static_cast<std::int64_t>(shape.shape.size()), config);
      out.push_back({{std::move(shape.name), std::move(shape.shape), group}, trainable});
    }
  };
  add(parameter_shapes(model), !lora);
  if (lora) add(lora_parameter_shapes(model, *lora), true);
  return out;
}

std::string describe(const MemoryPlan& plan) {
  std::string out;
  for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) {
    const MemoryUsage& usage = plan[tier];
    if (usage.total().value == 0) continue;
    out += fmt::format("  {:<8} {:>9}  {}\n", to_string(tier), to_string(usage.total()), to_string(usage));
  }
  return out;
}

}  // namespace spillway
