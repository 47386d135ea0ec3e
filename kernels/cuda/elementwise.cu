// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/thread_body.h"
#include "kernels/cuda_kernels.h"

namespace spillway::kernels::cuda {
namespace {

__device__ Turn turn_of_this_thread() {
  return {std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, std::int64_t{gridDim.x} * blockDim.x};
}

template <class Body>
__global__ void __launch_bounds__(kThreads) elementwise_kernel(Body body, Shares shares) {
  for_shares(shares, turn_of_this_thread(), body);
}

template <class Body>
Code elementwise(void* stream, const Body& body, const Shares& shares) {
  if (shares.count == 0) return 0;
  elementwise_kernel<<<blocks_for(shares), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body, shares);
  return cudaGetLastError();
}

// Whole warps go round, so that all threads of one take part in the exchange.
__global__ void __launch_bounds__(kThreads)
    square_sums_kernel(double* sums, const void* values, Element type, std::int64_t count) {
  const Turn turn = turn_of_this_thread();
  const std::int64_t lane = turn.first % kWarp;
  for (std::int64_t grain = turn.first / kWarp; grain < grains_of(count); grain += turn.stride / kWarp) {
    double sum = partial_square_sum(values, type, grain * kGrain, grain_size(count, grain), lane);
    // What threads from `width` on add up is read by nobody.
    for (int width = kWarp / 2; width > 0; width /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, width);
    if (lane == 0) sums[grain] = sum;
  }
}

}  // namespace

Code widen(void* stream, float* target, const void* source, Element type, std::int64_t count) {
  const Shares shares = share_out(count, {{target, 4}, {source, element_bytes(type)}});
  return elementwise(stream, WidenBody{target, source, type}, shares);
}

Code accumulate(void* stream, void* target, Element target_type, const void* source, Element type, std::int64_t count) {
  const Shares shares = share_out(count, {{target, element_bytes(target_type)}, {source, element_bytes(type)}});
  return elementwise(stream, AccumulateBody{target, target_type, source, type}, shares);
}

Code narrow(void* stream, void* target, Element type, const float* source, std::int64_t count) {
  const Shares shares = share_out(count, {{target, element_bytes(type)}, {source, 4}});
  return elementwise(stream, NarrowBody{target, type, source}, shares);
}

Code grain_square_sums(void* stream, double* sums, const void* values, Element type, std::int64_t count) {
  if (count == 0) return 0;
  square_sums_kernel<<<blocks_for(grains_of(count) * kWarp), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      sums, values, type, count);
  return cudaGetLastError();
}

}  // namespace spillway::kernels::cuda
