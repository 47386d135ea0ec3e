// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU kernels: pure functions on pointers and counts, compiled once per instruction set and picked at run time.
// Numerics: docs/numerics.md. Every path gives the same bits at any alignment, length, split (at multiples of the
// grain) and thread count. Kernels allocate nothing, take no lock, and never read or write past `count` elements. C++17
// and the standard library alone.

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/scalars.h"
#include "kernels/state_formats.h"

namespace spillway::kernels {

/// One instruction set's kernels. Pointers need only their element's natural alignment; arrays of one call must not
/// overlap unless said.
struct CpuKernels {
  const char* name;  // "baseline" (on aarch64 that is NEON), "avx2", "avx512"

  /// p, m, v [count] updated in place from g [count] of type `g_type` (not none); `copy` [count] receives the rounded
  /// working copy of p unless `copy_type` is none (then it may be null).
  void (*adam)(const AdamScalars& scalars, float* p, float* m, float* v, const void* g, Element g_type, void* copy,
               Element copy_type, std::int64_t count);

  /// The same for the other optimizers. `b` may be null where momentum is 0; its first step does not read it.
  void (*sgd)(const SgdScalars& scalars, float* p, float* b, const void* g, Element g_type, void* copy,
              Element copy_type, std::int64_t count);
  void (*adagrad)(const AdagradScalars& scalars, float* p, float* h, const void* g, Element g_type, void* copy,
                  Element copy_type, std::int64_t count);
  void (*lion)(const LionScalars& scalars, float* p, float* m, const void* g, Element g_type, void* copy,
               Element copy_type, std::int64_t count);

  /// The same with masters and states in their small forms (state_formats.h).
  void (*adam_packed)(const AdamScalars& scalars, const UpdateArrays& arrays);
  void (*sgd_packed)(const SgdScalars& scalars, const UpdateArrays& arrays);
  void (*adagrad_packed)(const AdagradScalars& scalars, const UpdateArrays& arrays);
  void (*lion_packed)(const LionScalars& scalars, const UpdateArrays& arrays);

  /// The same, after writing what they change to `log`: one pass over memory.
  void (*adam_logged)(const AdamScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log);
  void (*sgd_logged)(const SgdScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log);
  void (*adagrad_logged)(const AdagradScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log);
  void (*lion_logged)(const LionScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log);

  /// A state from and to fp32. `first` and `key` as in UpdateArrays; only bf16 reads them.
  void (*pack_state)(const StateArray& target, StateKind kind, const float* source, std::int64_t count,
                     std::int64_t first, const RoundingKey& key);
  void (*unpack_state)(float* target, const StateArray& source, StateKind kind, std::int64_t count);
  /// fp32 masters to and from working copies and their low halves.
  void (*split_master)(std::uint16_t* working, std::uint16_t* low, const float* source, std::int64_t count);
  void (*join_master)(float* target, const std::uint16_t* working, const std::uint16_t* low, std::int64_t count);

  /// target = widen(source): fp32 from any element type (f32: a copy).
  void (*widen)(float* target, const void* source, Element type, std::int64_t count);
  /// target += widen(source).
  void (*accumulate)(float* target, const void* source, Element type, std::int64_t count);
  /// target = round(source): to nearest even, NaN stays NaN, f16 overflows to infinity.
  void (*narrow)(void* target, Element type, const float* source, std::int64_t count);

  /// sums[i] = the sum of squares, in double, of grain i of `values` (the last may be short): ceil(count / kGrain)
  /// results. A grain with an infinity or a NaN gives a sum that is not finite; no other does.
  /// Order: 32 partial sums, the j-th over elements j, j + 32, j + 64, ... from +0 up; then, for w = 16, 8, 4, 2, 1,
  /// partial[j] += partial[j + w] for j < w; the sum is partial[0].
  void (*grain_square_sums)(double* sums, const float* values, std::int64_t count);
};

/// The fastest set this processor runs.
const CpuKernels& cpu_kernels();
/// The set of that name, or null where this build or this processor has none.
const CpuKernels* cpu_kernels(std::string_view name);
/// Names of all sets that run here, "baseline" first.
std::vector<std::string_view> cpu_kernel_names();

}  // namespace spillway::kernels
