// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "kernels/cpu/kernel_sets.h"

namespace spillway::kernels {
namespace {

struct Candidate {
  const CpuKernels* kernels;
  bool runs_here;
};

bool always() {
  return true;
}

#if defined(__x86_64__)
// The builtin also asks whether the operating system saves the wide registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Slowest first.
auto candidates() {
  return std::array {
    Candidate{&kBaselineKernels, always()},
#if defined(__x86_64__)
        Candidate{&kAvx2Kernels, has_avx2()}, Candidate{&kAvx512Kernels, has_avx512()},
#endif
  };
}

}  // namespace

const CpuKernels& cpu_kernels() {
  const CpuKernels* best = &kBaselineKernels;
  for (const Candidate& candidate : candidates()) {
    if (candidate.runs_here) best = candidate.kernels;
  }
  return *best;
}

const CpuKernels* cpu_kernels(std::string_view name) {
  for (const Candidate& candidate : candidates()) {
    if (candidate.runs_here && name == candidate.kernels->name) return candidate.kernels;
  }
  return nullptr;
}

std::vector<std::string_view> cpu_kernel_names() {
  std::vector<std::string_view> names;
  for (const Candidate& candidate : candidates()) {
    if (candidate.runs_here) names.push_back(candidate.kernels->name);
  }
  return names;
}

}  // namespace spillway::kernels
