// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu_kernels.h"

namespace spillway::kernels {

// The sets this build holds; all but the first may only be called on processors that have the instructions.
extern const CpuKernels kBaselineKernels;
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;

/// Whether updates ask for lines ahead of what the processor fetches by itself: on processors of Intel's, which gain by
/// it. On others it was measured to cost up to 40 % (docs/benchmarks.md).
extern const bool kPrefetchesAhead;

}  // namespace spillway::kernels
