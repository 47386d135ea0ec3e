// SPDX-License-Identifier: Apache-2.0
//
// Compute, copies and the optimizer, alone and beside each other.
#include <torch/torch.h>

#include <algorithm>

#include "benchmarks/offload/sections.h"
#include "spillway/core/error.h"

namespace spillway::bench {
namespace {

/// Products of two square matrices on the device, in compute order.
class MatmulLoop {
 public:
  MatmulLoop(Machine& machine, std::int64_t size, int threads)
      : machine_(machine),
        threads_(threads),
        a_(torch::randn({size, size}, torch::device(device(machine)))),
        b_(torch::randn({size, size}, torch::device(device(machine)))),
        c_(torch::empty_like(a_)) {}

  Activity activity() {
    // LibTorch's number of threads is a matter of the calling thread.
    return {"compute", [this] { torch::set_num_threads(threads_); }, [this] { multiply(); }, {}};
  }

 private:
  static torch::Device device(Machine& machine) {
    return machine.kind() == DeviceKind::cuda ? torch::kCUDA : torch::kCPU;
  }

  void multiply() {
    const torch::NoGradGuard no_grad;
    torch::matmul_out(c_, a_, b_);
    const auto size = static_cast<double>(a_.size(0));
    machine_.compute().mark("matmul", -1, 2 * size * size * size).wait();
  }

  Machine& machine_;
  const int threads_;
  const torch::Tensor a_, b_;
  torch::Tensor c_;
};

using Samples = std::map<std::string, std::map<std::string, std::vector<double>>>;

void measure(const std::string& set, const std::vector<Activity>& activities, double seconds, Samples& out) {
  const auto measured = run_together(activities, seconds);
  for (std::size_t i = 0; i < activities.size(); ++i) {
    std::vector<double>& all = out[set][activities[i].name];
    all.insert(all.end(), measured[i].begin(), measured[i].end());
  }
}

}  // namespace

double Interference::slowdown(const std::string& activity, const std::string& set) const {
  const std::string own = activity == "h2d" || activity == "d2h" ? "copies" : activity;
  return sets.at(set).at(activity).median / sets.at(own).at(activity).median;
}

Interference measure_interference(const Options& options) {
  Interference out;
  out.adam_threads = std::max(1, available_cores() / 2);  // what an engine takes where it is not told
  out.copy_bytes = std::min(options.sizes.back(), Bytes{std::int64_t{16} << 20}).value;
  const auto machine = make_machine(options.device, out.adam_threads);
  CopyLoop up(*machine, Tier::pinned, Direction::h2d, {out.copy_bytes});
  CopyLoop down(*machine, Tier::pinned, Direction::d2h, {out.copy_bytes});
  AdamLoop adam(*machine, options.parameters, true);
  MatmulLoop matmul(*machine, options.matmul, options.compute_threads);
  const Activity x = matmul.activity(), u = up.activity(), d = down.activity(), a = adam.activity();
  Samples samples;
  // In turn, round by round, so that a machine that changes its speed meanwhile changes it for all.
  for (int round = 0; round < options.rounds; ++round) {
    measure("compute", {x}, options.seconds, samples);
    measure("copies", {u, d}, options.seconds, samples);
    measure("adam", {a}, options.seconds, samples);
    measure("compute+copies", {x, u, d}, options.seconds, samples);
    measure("compute+adam", {x, a}, options.seconds, samples);
    measure("copies+adam", {u, d, a}, options.seconds, samples);
    measure("compute+copies+adam", {x, u, d, a}, options.seconds, samples);
  }
  for (auto& [set, activities] : samples) {
    for (auto& [activity, seconds] : activities) out.sets[set][activity] = spread_of(std::move(seconds));
  }
  return out;
}

}  // namespace spillway::bench
