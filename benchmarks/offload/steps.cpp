// SPDX-License-Identifier: Apache-2.0
//
// A whole training step, resident and offloaded: its time, and what each lane does in it.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "benchmarks/offload/sections.h"
#include "spillway/models/causal_lm.h"
#include "spillway/train/engine.h"

namespace spillway::bench {
namespace {

constexpr int kWarmUpSteps = 2, kLeastSteps = 3;

std::map<std::string, double> busy(const Engine& engine) {
  std::map<std::string, double> out;
  for (const TrackTotal& lane : engine.summary().lanes) out[lane.name] = lane.busy_seconds;
  return out;
}

double timed_step(CausalLM& model, Engine& engine, const torch::Tensor& inputs, const torch::Tensor& targets) {
  const auto begin = std::chrono::steady_clock::now();
  const torch::Tensor loss = next_token_loss(model.forward(inputs), targets, targets.numel());
  engine.backward(loss, {.last = true});
  engine.step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Config config_of(const Options& options, const std::string& schedule) {
  Config config;
  config.schedule = schedule;
  config.device = options.device;
  config.clip_norm = 1;
  return config;
}

/// Runs one schedule for a while and adds to what is known of it.
void run(const Options& options, StepSchedule& out, std::vector<double>& seconds, std::int64_t& steps) {
  const auto model = make_causal_lm(options.model, 1);
  torch::manual_seed(2);
  const torch::Tensor inputs =
      torch::randint(options.model.vocabulary, {options.batch, options.length}, torch::dtype(torch::kLong));
  const torch::Tensor targets = inputs.roll(-1, 1);
  Engine engine(*model, config_of(options, out.schedule));
  const torch::Device device = model->parameters().front().device();
  for (int i = 0; i < kWarmUpSteps; ++i) timed_step(*model, engine, inputs.to(device), targets.to(device));
  engine.wait_parameters();
  const auto before = busy(engine);
  double spent = 0;
  for (int i = 0; i < kLeastSteps || spent < options.seconds; ++i, ++steps) {
    seconds.push_back(timed_step(*model, engine, inputs.to(device), targets.to(device)));
    spent += seconds.back();
  }
  engine.wait_parameters();
  for (const auto& [lane, value] : busy(engine)) {
    const auto earlier = before.find(lane);
    out.busy_seconds[lane] += value - (earlier == before.end() ? 0 : earlier->second);
  }
  out.device_peak_bytes = std::max(out.device_peak_bytes, engine.summary().device_peak.value);
}

}  // namespace

StepComparison measure_steps(const Options& options) {
  StepComparison out;
  for (const ParameterShape& shape : parameter_shapes(options.model)) out.parameters += shape.numel();
  out.tokens = options.batch * options.length;
  out.schedules = {{"resident", {}, {}, 0}, {"zero_offload", {}, {}, 0}};
  torch::set_num_threads(options.compute_threads);
  std::vector<std::vector<double>> seconds(out.schedules.size());
  std::vector<std::int64_t> steps(out.schedules.size(), 0);
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t s = 0; s < out.schedules.size(); ++s) run(options, out.schedules[s], seconds[s], steps[s]);
  }
  for (std::size_t s = 0; s < out.schedules.size(); ++s) {
    out.schedules[s].seconds = spread_of(std::move(seconds[s]));
    for (auto& lane : out.schedules[s].busy_seconds) lane.second /= static_cast<double>(steps[s]);
  }
  return out;
}

}  // namespace spillway::bench
