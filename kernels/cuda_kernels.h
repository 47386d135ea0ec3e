// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA kernels: twins of cpu_kernels.h, from the same arithmetic, with the same bits at any alignment, length and
// split (at multiples of the grain). Each call enqueues one kernel on `stream` (a cudaStream_t; the calling thread's
// device must be the stream's) and returns at once with CUDA's error code: 0 where it was enqueued. Pointers are device
// memory with their element's natural alignment; arrays of one call must not overlap. Nothing is allocated. C++17 and
// the standard library alone.

#include <cstdint>

#include "kernels/scalars.h"

namespace spillway::kernels::cuda {

/// The error code of a launch: 0 is success.
using Code = int;

// The optimizers: arguments as in CpuKernels.
[[nodiscard]] Code adam(void* stream, const AdamScalars& scalars, float* p, float* m, float* v, const void* g,
                        Element g_type, void* copy, Element copy_type, std::int64_t count);
[[nodiscard]] Code sgd(void* stream, const SgdScalars& scalars, float* p, float* b, const void* g, Element g_type,
                       void* copy, Element copy_type, std::int64_t count);
[[nodiscard]] Code adagrad(void* stream, const AdagradScalars& scalars, float* p, float* h, const void* g,
                           Element g_type, void* copy, Element copy_type, std::int64_t count);
[[nodiscard]] Code lion(void* stream, const LionScalars& scalars, float* p, float* m, const void* g, Element g_type,
                        void* copy, Element copy_type, std::int64_t count);

/// target = widen(source).
[[nodiscard]] Code widen(void* stream, float* target, const void* source, Element type, std::int64_t count);
/// target = round(widen(target) + widen(source)): in fp32, no rounding is left to do.
[[nodiscard]] Code accumulate(void* stream, void* target, Element target_type, const void* source, Element type,
                              std::int64_t count);
/// target = round(source).
[[nodiscard]] Code narrow(void* stream, void* target, Element type, const float* source, std::int64_t count);

/// sums[i] = the square sum of grain i, in the order of CpuKernels::grain_square_sums. All of them are finite where all
/// values are: so the sums are the finite check, too.
[[nodiscard]] Code grain_square_sums(void* stream, double* sums, const void* values, Element type, std::int64_t count);

}  // namespace spillway::kernels::cuda
