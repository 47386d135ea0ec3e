// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/kernel_sets.h"
#include "kernels/cpu/kernels_body.h"

namespace spillway::kernels {

const CpuKernels kAvx2Kernels = make_kernels("avx2");

}  // namespace spillway::kernels
