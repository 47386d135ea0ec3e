// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/kernel_sets.h"
#include "kernels/cpu/kernels_body.h"

namespace spillway::kernels {

const CpuKernels kBaselineKernels = make_kernels("baseline");

}  // namespace spillway::kernels
