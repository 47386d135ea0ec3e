// SPDX-License-Identifier: Apache-2.0
#include "tools/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "kernels/cpu_kernels.h"
#include "spillway/core/error.h"
#include "spillway/lane/thread_team.h"
#include "spillway/runtime/cores.h"

namespace spillway::tools {
namespace {

using namespace kernels;

struct Form {
  const char* name;
  StateFormat states;
  bool split, wide_gradient;
  int bytes;  // read and written for a parameter
};

constexpr Form kForms[] = {{"fp32, fp32 gradients", StateFormat::f32, false, true, 28},
                           {"fp32, bf16 gradients and copy", StateFormat::f32, false, false, 28},
                           {"split master", StateFormat::f32, true, false, 26},
                           {"bf16 states", StateFormat::bf16, false, false, 20},
                           {"split master, bf16 states", StateFormat::bf16, true, false, 18},
                           {"8-bit states", StateFormat::block8, false, false, 16},
                           {"split master, 8-bit states", StateFormat::block8, true, false, 14}};

/// AdamW's arrays, large enough for every form, first touched by the threads that use them.
class Arrays {
 public:
  Arrays(const CpuKernels& set, ThreadTeam& team, std::int64_t count) : set_(set), team_(team), count_(count) {
    const auto n = static_cast<std::size_t>(count);
    for (auto* array : {&p_, &m_, &v_, &g_}) *array = std::make_unique_for_overwrite<float[]>(n);
    for (auto* array : {&working_, &low_, &half_}) *array = std::make_unique_for_overwrite<std::uint16_t[]>(n);
    for (auto& scales : scales_) scales = std::make_unique_for_overwrite<float[]>(n / kBlock + 1);
    team_.parallel_for(count_ / kGrain, [&](std::int64_t begin, std::int64_t end) {
      const auto fill = [&](auto* array, auto value) {
        std::fill(array + begin * kGrain, array + end * kGrain, value);
      };
      fill(p_.get(), 0.02f);
      fill(g_.get(), 1e-3f);
      fill(low_.get(), std::uint16_t{0});
      set_.narrow(half_.get() + begin * kGrain, Element::bf16, g_.get() + begin * kGrain, (end - begin) * kGrain);
      set_.narrow(working_.get() + begin * kGrain, Element::bf16, p_.get() + begin * kGrain, (end - begin) * kGrain);
    });
  }

  /// States of the form, as after a step.
  void begin(const Form& form) {
    const std::vector<float> values(kGrain, 1e-4f);
    for (std::int64_t i = 0; i < count_; i += kGrain) {
      for (int k = 0; k < 2; ++k) {
        set_.pack_state(state(form, k, i), k == 0 ? StateKind::any_sign : StateKind::square, values.data(), kGrain, i,
                        {});
      }
    }
  }

  double seconds(const Form& form) {
    const AdamScalars scalars = adam_scalars(1e-4, 0.9, 0.999, 1e-8, 0.01, true, 100, 1);
    const auto start = std::chrono::steady_clock::now();
    team_.parallel_for(count_ / kGrain, [&](std::int64_t begin, std::int64_t end) {
      set_.adam_packed(scalars, slice(form, begin * kGrain, (end - begin) * kGrain));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  StateArray state(const Form& form, int k, std::int64_t i) {
    const int bytes = form.states == StateFormat::f32 ? 4 : form.states == StateFormat::bf16 ? 2 : 1;
    char* data = reinterpret_cast<char*>(k == 0 ? m_.get() : v_.get());
    return {form.states, data + i * bytes, scales_[k].get() + i / kBlock};
  }

  UpdateArrays slice(const Form& form, std::int64_t i, std::int64_t count) {
    UpdateArrays arrays;
    arrays.p = form.split ? MasterArray{nullptr, working_.get() + i, low_.get() + i}
                          : MasterArray{p_.get() + i, nullptr, nullptr};
    for (int k = 0; k < 2; ++k) arrays.states[k] = state(form, k, i);
    arrays.g = form.wide_gradient ? static_cast<const void*>(g_.get() + i) : half_.get() + i;
    arrays.g_type = form.wide_gradient ? Element::f32 : Element::bf16;
    const bool copies = !form.split && !form.wide_gradient;
    arrays.copy = copies ? working_.get() + i : nullptr;
    arrays.copy_type = copies ? Element::bf16 : Element::none;
    arrays.count = count;
    arrays.first = i;
    return arrays;
  }

  const CpuKernels& set_;
  ThreadTeam& team_;
  std::int64_t count_;
  std::unique_ptr<float[]> p_, m_, v_, g_, scales_[2];
  std::unique_ptr<std::uint16_t[]> working_, low_, half_;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

const CpuKernels& chosen_set(const std::string& name) {
  if (name.empty()) return cpu_kernels();
  const CpuKernels* set = cpu_kernels(name);
  require(set != nullptr, fmt::format("instruction set \"{}\" was asked for; this processor and build have: {}", name,
                                      fmt::join(cpu_kernel_names(), ", ")));
  return *set;
}

}  // namespace

std::string bench(const BenchOptions& options) {
  const CpuKernels& set = chosen_set(options.instruction_set);
  require(options.rounds >= 1, "the number of rounds is below one");
  const CorePlan plan = plan_cores({.threads = options.threads, .cores = options.cores});
  ThreadTeam team(plan.threads, plan.processors);
  const std::int64_t count = std::max<std::int64_t>(1, options.parameters / kGrain) * kGrain;
  std::string text =
      fmt::format("instruction sets here   {}\nchosen                  {}\nCPU optimizer           {}\n\n",
                  fmt::join(cpu_kernel_names(), ", "), set.name, plan.description);
  text += fmt::format("AdamW, {} parameters, median of {} rounds\n{:32}{:>12}{:>12}{:>10}\n", count, options.rounds, "",
                      "bytes/param", "ns/param", "GB/s");
  Arrays arrays(set, team, count);
  for (const Form& form : kForms) {
    arrays.begin(form);
    arrays.seconds(form);  // pages and caches
    std::vector<double> times;
    for (int i = 0; i < options.rounds; ++i) times.push_back(arrays.seconds(form) / static_cast<double>(count) * 1e9);
    text += fmt::format("{:32}{:>12}{:>12.3f}{:>10.1f}\n", form.name, form.bytes, median(times),
                        form.bytes / median(times));
  }
  return text;
}

}  // namespace spillway::tools
