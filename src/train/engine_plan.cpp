// SPDX-License-Identifier: Apache-2.0
#include "train/engine_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "spillway/core/error.h"
#include "spillway/runtime/machine.h"

namespace spillway {
namespace {

std::int64_t padded_to_grain(std::int64_t elements) {
  return (elements + kGrainElements - 1) / kGrainElements * kGrainElements;
}

std::unique_ptr<Layout> make_layout(const std::vector<ModelParameter>& trainable, const Config& config) {
  std::vector<ParameterInfo> infos;
  std::int64_t total = 0;
  for (const ModelParameter& parameter : trainable) {
    infos.push_back({parameter.name, parameter.tensor.sizes().vec(), parameter.group});
    total += padded_to_grain(infos.back().numel());
  }
  const std::int64_t wanted = config.chunk_elements > 0 ? config.chunk_elements : default_chunk_elements(total);
  // Staging slots are as large as a chunk: one larger than the model would only waste memory.
  return std::make_unique<Layout>(std::move(infos), std::min(wanted, std::max(total, kGrainElements)));
}

StateSpec make_spec(const Layout& layout, const std::vector<ModelParameter>& frozen, const ScheduleEntry& schedule,
                    const Config& config) {
  StateSpec spec;
  spec.working = config.precision;
  spec.placement.assign(layout.chunks().size(), schedule.placement);
  if (schedule.stages && !layout.chunks().empty()) {
    // More slots than chunks would never be used.
    spec.device_slots = std::min<std::int64_t>(config.staging_slots, static_cast<std::int64_t>(layout.chunks().size()));
    spec.pinned_slots = spec.device_slots;
    if (config.precision != DType::f32) spec.upload_slots = spec.device_slots;
  }
  for (const ModelParameter& parameter : frozen) spec.frozen_elements += padded_to_grain(parameter.tensor.numel());
  return spec;
}

std::optional<Bytes> capacity_of(Tier tier, const Config& config) {
  if (tier == Tier::device) return config.device.memory;
  if (tier == Tier::pinned) return config.host_memory;
  return std::nullopt;
}

bool fits(const MemoryPlan& memory, const Config& config) {
  for (Tier tier : {Tier::device, Tier::pinned}) {
    const std::optional<Bytes> capacity = capacity_of(tier, config);
    if (capacity && memory[tier].total() > *capacity) return false;
  }
  return true;
}

// The first other schedule that fits, in words.
std::string alternative(const EnginePlan& plan, const Config& config) {
  for (const ScheduleEntry& entry : schedules()) {
    if (&entry == plan.schedule) continue;
    const MemoryPlan memory = plan_state(*plan.layout, make_spec(*plan.layout, plan.frozen, entry, config));
    if (!fits(memory, config)) continue;
    return fmt::format("; schedule {} would fit, with {} on the device and {} pinned", entry.name,
                       to_string(memory[Tier::device].total()), to_string(memory[Tier::pinned].total()));
  }
  return "; no other schedule fits either: a larger capacity, a smaller model, or smaller chunks are needed";
}

}  // namespace

EnginePlan make_engine_plan(const torch::nn::Module& model, const Config& config) {
  config.validate();
  require(config.device.kind == DeviceConfig::Kind::emulated,
          "device cuda is not supported by this build: use the emulated device");
  EnginePlan plan;
  plan.schedule = &find_schedule(config.schedule);
  for (ModelParameter& parameter : collect_parameters(model, config)) {
    (parameter.trainable ? plan.trainable : plan.frozen).push_back(std::move(parameter));
  }
  plan.layout = make_layout(plan.trainable, config);
  plan.spec = make_spec(*plan.layout, plan.frozen, *plan.schedule, config);
  plan.memory = plan_state(*plan.layout, plan.spec);
  return plan;
}

void check_fits(const EnginePlan& plan, const Config& config) {
  for (Tier tier : {Tier::device, Tier::pinned}) {
    const std::optional<Bytes> capacity = capacity_of(tier, config);
    const Bytes needed = plan.memory[tier].total();
    if (!capacity || needed <= *capacity) continue;
    throw OutOfMemory(
        fmt::format("schedule {} needs {} of {} memory before any activation ({}), but there are {}: {} ({} "
                    "bytes) are missing{}",
                    plan.schedule->name, to_string(needed), to_string(tier), to_string(plan.memory[tier]),
                    to_string(*capacity), to_string(needed - *capacity), (needed - *capacity).value,
                    alternative(plan, config)),
        needed.value, (needed - *capacity).value);
  }
  // Pools are touched when they are made: without this check the system would end the process instead.
  const std::optional<Bytes> available = available_host_memory();
  const Bytes total =
      plan.memory[Tier::device].total() + plan.memory[Tier::pinned].total() + plan.memory[Tier::host].total();
  if (available && total > *available) {
    throw OutOfMemory(
        fmt::format("the emulated device and pinned memory together need {}, but this machine has {} left: "
                    "{} are missing",
                    to_string(total), to_string(*available), to_string(total - *available)),
        total.value, (total - *available).value);
  }
}

}  // namespace spillway
