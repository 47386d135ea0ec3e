// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/kernel_sets.h"
#include "kernels/cpu/kernels_body.h"

namespace spillway::kernels {

const CpuKernels kAvx512Kernels = make_kernels("avx512");

}  // namespace spillway::kernels
