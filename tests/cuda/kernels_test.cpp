// SPDX-License-Identifier: Apache-2.0
// Every CUDA kernel against the processor's, bit for bit.
#include <functional>

#include "cuda/gpu.h"
#include "kernels/bit_equality.h"
#include "kernels/cuda_kernels.h"

namespace spillway::test {
namespace {

using kernels::Element;

constexpr std::int64_t kLengths[] = {1, 3, 4, 5, 31, 257, 1023, 1024, 1025, 70'001};
constexpr std::int64_t kOffsets[] = {0, 1, 2, 3};

// A launch goes to the default stream, which the copies of GpuArray wait for.
void launched(kernels::cuda::Code code) {
  ASSERT_EQ(code, 0);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

/// The elements as 16 bits or 32, as memory holds them.
std::vector<std::uint16_t> raw(const Typed& values) {
  if (!values.half.empty()) return values.half;
  const auto* words = reinterpret_cast<const std::uint16_t*>(values.wide.data());
  return {words, words + 2 * values.wide.size()};
}
std::int64_t words(Element type) {
  return type == Element::f32 ? 2 : 1;
}

struct Kernels : OnGpu {
  using Launch = std::function<kernels::cuda::Code(float* p, float* s0, float* s1, const void* g, Element g_type,
                                                   void* copy, Element copy_type, std::int64_t count)>;
  using Cpu = std::function<void(float* p, float* s0, float* s1, const void* g, Element g_type, void* copy,
                                 Element copy_type, std::int64_t count)>;

  static void compare(const Problem& problem, Element g_type, Element copy_type, std::int64_t offset,
                      const Launch& launch, const Cpu& cpu) {
    const Typed g = round_to(g_type, problem.g);
    const auto count = static_cast<std::int64_t>(problem.size());
    std::vector<float> p = problem.p, s0 = problem.s0, s1 = problem.s1;
    std::vector<std::uint16_t> copy(static_cast<std::size_t>(2 * count));
    const GpuArray<float> gpu_p(p, offset), gpu_s0(s0, offset), gpu_s1(s1, offset);
    const GpuArray<std::uint16_t> gpu_g(raw(g), offset * words(g_type)), gpu_copy(copy, offset * words(copy_type));
    const bool copies = copy_type != Element::none;
    cpu(p.data(), s0.data(), s1.data(), g.data(), g_type, copies ? copy.data() : nullptr, copy_type, count);
    launched(launch(gpu_p.data(), gpu_s0.data(), gpu_s1.data(), gpu_g.data(), g_type,
                    copies ? gpu_copy.data() : nullptr, copy_type, count));
    ASSERT_TRUE(same_bits(gpu_p.values(), p));
    ASSERT_TRUE(same_bits(gpu_s0.values(), s0));
    ASSERT_TRUE(same_bits(gpu_s1.values(), s1));
    if (copy_type == Element::bf16 || copy_type == Element::f16) {
      ASSERT_TRUE(same_bits(gpu_copy.values(), copy, copy_type));
    }
  }

  static void expect_same_bits(const Launch& launch, const Cpu& cpu) {
    for (Element g_type : kGradientTypes) {
      for (Element copy_type : kCopyTypes) {
        for (std::int64_t offset : kOffsets) {
          for (std::int64_t length : kLengths) {
            compare(ordinary_problem(static_cast<std::size_t>(length), 7), g_type, copy_type, offset, launch, cpu);
          }
        }
        compare(wild_problem(100'003, 8), g_type, copy_type, 0, launch, cpu);
        compare(special_problem(), g_type, copy_type, 0, launch, cpu);
        if (HasFatalFailure()) return;
      }
    }
  }

  const kernels::CpuKernels& cpu = kernels::cpu_kernels();
};

TEST_F(Kernels, Adam) {
  for (bool decoupled : {true, false}) {
    const auto s = kernels::adam_scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled, 3, 0.5f);
    expect_same_bits(
        [s](float* p, float* m, float* v, auto... rest) { return kernels::cuda::adam(nullptr, s, p, m, v, rest...); },
        [&](float* p, float* m, float* v, auto... rest) { cpu.adam(s, p, m, v, rest...); });
  }
}

TEST_F(Kernels, Sgd) {
  for (double momentum : {0.0, 0.9}) {
    for (std::int64_t step : {1, 2}) {
      const auto s = kernels::sgd_scalars(1e-2, momentum, 0.1, 0.1, step == 2, step, 0.5f);
      expect_same_bits(
          [s](float* p, float* b, float*, auto... rest) { return kernels::cuda::sgd(nullptr, s, p, b, rest...); },
          [&](float* p, float* b, float*, auto... rest) { cpu.sgd(s, p, b, rest...); });
    }
  }
}

TEST_F(Kernels, Adagrad) {
  const auto s = kernels::adagrad_scalars(1e-2, 0.1, 1e-10, 0.1, 3, 0.5f);
  expect_same_bits(
      [s](float* p, float* h, float*, auto... rest) { return kernels::cuda::adagrad(nullptr, s, p, h, rest...); },
      [&](float* p, float* h, float*, auto... rest) { cpu.adagrad(s, p, h, rest...); });
}

TEST_F(Kernels, Lion) {
  const auto s = kernels::lion_scalars(1e-4, 0.9, 0.99, 0.1, 0.5f);
  expect_same_bits(
      [s](float* p, float* m, float*, auto... rest) { return kernels::cuda::lion(nullptr, s, p, m, rest...); },
      [&](float* p, float* m, float*, auto... rest) { cpu.lion(s, p, m, rest...); });
}

TEST_F(Kernels, ConversionsAndSums) {
  for (Element type : kGradientTypes) {
    for (std::int64_t offset : kOffsets) {
      for (std::int64_t length : kLengths) {
        const Problem problem = wild_problem(static_cast<std::size_t>(length), 9);
        const Typed source = round_to(type, problem.g);
        std::vector<float> sum = problem.p;
        const GpuArray<float> gpu_sum(sum, offset), gpu_values(problem.p, offset);
        const GpuArray<std::uint16_t> gpu_source(raw(source), offset * words(type));
        launched(kernels::cuda::accumulate(nullptr, gpu_sum.data(), Element::f32, gpu_source.data(), type, length));
        cpu.accumulate(sum.data(), source.data(), type, length);
        ASSERT_TRUE(same_bits(gpu_sum.values(), sum));
        launched(kernels::cuda::widen(nullptr, gpu_sum.data(), gpu_source.data(), type, length));
        ASSERT_TRUE(same_bits(gpu_sum.values(), source.wide));
        if (type == Element::f32) continue;
        std::vector<std::uint16_t> rounded(static_cast<std::size_t>(length));
        launched(kernels::cuda::narrow(nullptr, gpu_source.data(), type, gpu_values.data(), length));
        cpu.narrow(rounded.data(), type, problem.p.data(), length);
        ASSERT_TRUE(same_bits(gpu_source.values(), rounded, type));
        // A sum kept in 16 bits: to itself once more.
        launched(kernels::cuda::accumulate(nullptr, gpu_source.data(), type, gpu_values.data(), Element::f32, length));
        std::vector<float> wide(rounded.size());
        cpu.widen(wide.data(), rounded.data(), type, length);
        cpu.accumulate(wide.data(), problem.p.data(), Element::f32, length);
        cpu.narrow(rounded.data(), type, wide.data(), length);
        ASSERT_TRUE(same_bits(gpu_source.values(), rounded, type));
      }
    }
  }
}

TEST_F(Kernels, GrainSquareSums) {
  for (Element type : kGradientTypes) {
    for (std::int64_t length : kLengths) {
      for (const Problem& problem : {ordinary_problem(static_cast<std::size_t>(length), 10),
                                     wild_problem(static_cast<std::size_t>(length), 11)}) {
        const Typed values = round_to(type, problem.g);
        std::vector<double> sums(static_cast<std::size_t>((length + kernels::kGrain - 1) / kernels::kGrain));
        const GpuArray<std::uint16_t> gpu_values(raw(values), words(type));
        const GpuArray<double> gpu_sums(sums, 0);
        launched(kernels::cuda::grain_square_sums(nullptr, gpu_sums.data(), gpu_values.data(), type, length));
        cpu.grain_square_sums(sums.data(), values.wide.data(), length);
        ASSERT_TRUE(same_bits(gpu_sums.values(), sums));
      }
    }
  }
}

}  // namespace
}  // namespace spillway::test
