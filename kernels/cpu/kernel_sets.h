// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu_kernels.h"

namespace spillway::kernels {

// The sets this build holds; all but the first may only be called on processors that have the instructions.
extern const CpuKernels kBaselineKernels;
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;

}  // namespace spillway::kernels
