// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "benchmarks/offload/sections.h"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Spread& s) {
  return {{"median", s.median}, {"q25", s.q25}, {"q75", s.q75}, {"min", s.min}, {"max", s.max}, {"samples", s.samples}};
}

Json machine_json(const MachineFacts& m) {
  Json out = {{"processor", m.processor}, {"cores", m.cores}, {"instruction_set", m.instruction_set}};
  if (m.memory_bytes >= 0) out["memory_available_bytes"] = m.memory_bytes;
  if (m.load >= 0) out["load_at_start"] = m.load;
  return out;
}

Json settings_json(const Options& o) {
  return {{"device", o.device.kind == DeviceConfig::Kind::cuda ? "cuda" : "emulated"},
          {"link_bytes_per_second", o.device.upload_bandwidth},
          {"seconds", o.seconds},
          {"rounds", o.rounds},
          {"matmul", o.matmul},
          {"compute_threads", o.compute_threads},
          {"adam_parameters", o.parameters}};
}

Json copies_json(const std::vector<CopyResult>& copies) {
  Json out = Json::array();
  for (const CopyResult& c : copies) {
    out.push_back({{"tier", to_string(c.tier)},
                   {"bytes", c.size.value},
                   {"direction", to_string(c.direction)},
                   {"alone_gb_per_s", json_of(c.alone)},
                   {"both_ways_gb_per_s", json_of(c.with_the_other)}});
  }
  return out;
}

Json adam_json(const std::vector<AdamResult>& results) {
  Json out = Json::array();
  for (const AdamResult& a : results) {
    out.push_back({{"threads", a.threads},
                   {"working_copy", a.bf16_copy ? "bf16" : "fp32"},
                   {"ns_per_parameter", json_of(a.ns_per_parameter)},
                   {"gb_per_s", json_of(a.gb_per_second)}});
  }
  return out;
}

Json interference_json(const Interference& in) {
  Json seconds = Json::object(), slowdown = Json::object();
  for (const auto& [set, activities] : in.sets) {
    for (const auto& [activity, spread] : activities) {
      seconds[set][activity] = json_of(spread);
      slowdown[set][activity] = in.slowdown(activity, set);
    }
  }
  return {
      {"copy_bytes", in.copy_bytes}, {"adam_threads", in.adam_threads}, {"seconds", seconds}, {"slowdown", slowdown}};
}

Json steps_json(const StepComparison& steps) {
  Json schedules = Json::object();
  for (const StepSchedule& s : steps.schedules) {
    schedules[s.schedule] = {
        {"seconds", json_of(s.seconds)}, {"busy_seconds", s.busy_seconds}, {"device_peak_bytes", s.device_peak_bytes}};
  }
  return {{"parameters", steps.parameters}, {"tokens", steps.tokens}, {"schedules", schedules}};
}

}  // namespace

std::string json(const Report& report, const Options& options) {
  const Json out = {{"schema", kSchema},
                    {"machine", machine_json(report.machine)},
                    {"settings", settings_json(options)},
                    {"copies", copies_json(report.copies)},
                    {"adam", adam_json(report.adam)},
                    {"interference", interference_json(report.interference)},
                    {"step", steps_json(report.steps)}};
  return out.dump(1) + "\n";
}

}  // namespace spillway::bench
