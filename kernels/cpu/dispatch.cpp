// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <array>

#include "kernels/cpu/kernel_sets.h"

namespace spillway::kernels {
namespace {

struct Candidate {
  const CpuKernels* kernels;
  bool runs_here;
};

#if defined(__x86_64__)
// clang 14's __builtin_cpu_supports does not know this one.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// The builtin also asks whether the operating system saves the wide registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && has_f16c();
}
bool has_avx512() {
  return has_f16c() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

bool is_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

// Slowest first.
auto candidates() {
  return std::array {
    Candidate{&kBaselineKernels, true},
#if defined(__x86_64__)
        Candidate{&kAvx2Kernels, has_avx2()}, Candidate{&kAvx512Kernels, has_avx512()},
#endif
  };
}

}  // namespace

const bool kPrefetchesAhead = is_intel();

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
