// SPDX-License-Identifier: Apache-2.0
//
// Copies by size and tier, alone and both ways at once; the optimizer on the CPU by number of threads.
#include "benchmarks/offload/sections.h"

namespace spillway::bench {
namespace {

Spread rate(std::vector<double> seconds, Bytes bytes) {
  for (double& value : seconds) value = static_cast<double>(bytes.value) / value * 1e-9;
  return spread_of(std::move(seconds));
}

void measure_pair(Machine& machine, Tier tier, Bytes size, double seconds, std::vector<CopyResult>& out) {
  CopyLoop up(machine, tier, Direction::h2d, size), down(machine, tier, Direction::d2h, size);
  const auto both = run_together({up.activity(), down.activity()}, seconds);
  const auto up_alone = run_together({up.activity()}, seconds);
  const auto down_alone = run_together({down.activity()}, seconds);
  const Bytes bytes = up.bytes_an_operation();
  out.push_back({tier, size, Direction::h2d, rate(up_alone.front(), bytes), rate(both.front(), bytes)});
  out.push_back({tier, size, Direction::d2h, rate(down_alone.front(), bytes), rate(both.back(), bytes)});
}

}  // namespace

std::vector<CopyResult> measure_copies(const Options& options) {
  const auto machine = make_machine(options.device, 1);
  std::vector<CopyResult> out;
  for (Tier tier : {Tier::host, Tier::pinned}) {
    for (Bytes size : options.sizes) measure_pair(*machine, tier, size, options.seconds, out);
  }
  return out;
}

std::vector<AdamResult> measure_adam(const Options& options) {
  std::vector<AdamResult> out;
  for (int threads : options.threads) {
    const auto machine = make_machine(options.device, threads);
    for (bool bf16_copy : {false, true}) {
      AdamLoop loop(*machine, options.parameters, bf16_copy);
      std::vector<double> seconds = run_together({loop.activity()}, options.seconds).front();
      AdamResult result{threads, bf16_copy, {}, rate(seconds, loop.bytes_an_operation())};
      for (double& value : seconds) value *= 1e9 / static_cast<double>(options.parameters);
      result.ns_per_parameter = spread_of(std::move(seconds));
      out.push_back(result);
    }
  }
  return out;
}

}  // namespace spillway::bench
