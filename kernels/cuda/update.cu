// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/thread_body.h"
#include "kernels/cuda_kernels.h"

namespace spillway::kernels::cuda {
namespace {

__device__ Turn turn_of_this_thread() {
  return {std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, std::int64_t{gridDim.x} * blockDim.x};
}

template <class Optimizer, class Scalars>
__global__ void __launch_bounds__(kThreads) update_kernel(Scalars scalars, UpdateSpan arrays, Shares shares) {
  update_thread<Optimizer>(scalars, arrays, shares, turn_of_this_thread());
}

template <class Optimizer, class Scalars>
Code update(void* stream, const Scalars& scalars, const UpdateSpan& arrays, std::int64_t count) {
  if (count == 0) return 0;
  const bool copies = arrays.copy_type != Element::none;
  const Shares shares =
      share_out(count, {{arrays.p, 4},
                        {Optimizer::kStates > 0 ? arrays.states[0] : nullptr, 4},
                        {Optimizer::kStates > 1 ? arrays.states[1] : nullptr, 4},
                        {arrays.g, element_bytes(arrays.g_type)},
                        {copies ? arrays.copy : nullptr, copies ? element_bytes(arrays.copy_type) : 4}});
  update_kernel<Optimizer>
      <<<blocks_for(shares), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(scalars, arrays, shares);
  return cudaGetLastError();
}

}  // namespace

Code adam(void* stream, const AdamScalars& scalars, float* p, float* m, float* v, const void* g, Element g_type,
          void* copy, Element copy_type, std::int64_t count) {
  return update<Adam>(stream, scalars, {p, {m, v}, g, copy, g_type, copy_type}, count);
}

Code sgd(void* stream, const SgdScalars& scalars, float* p, float* b, const void* g, Element g_type, void* copy,
         Element copy_type, std::int64_t count) {
  const UpdateSpan arrays{p, {b, nullptr}, g, copy, g_type, copy_type};
  return scalars.mu == 0 ? update<Sgd>(stream, scalars, arrays, count)
                         : update<SgdMomentum>(stream, scalars, arrays, count);
}

Code adagrad(void* stream, const AdagradScalars& scalars, float* p, float* h, const void* g, Element g_type, void* copy,
             Element copy_type, std::int64_t count) {
  return update<Adagrad>(stream, scalars, {p, {h, nullptr}, g, copy, g_type, copy_type}, count);
}

Code lion(void* stream, const LionScalars& scalars, float* p, float* m, const void* g, Element g_type, void* copy,
          Element copy_type, std::int64_t count) {
  return update<Lion>(stream, scalars, {p, {m, nullptr}, g, copy, g_type, copy_type}, count);
}

}  // namespace spillway::kernels::cuda
