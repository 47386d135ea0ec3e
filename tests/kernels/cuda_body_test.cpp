// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels' own code for one thread, called for every thread of a launch in turn: what a GPU computes, but for
// the launch itself and the GPU's arithmetic.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/bit_equality.h"
#include "kernels/cuda/thread_body.h"

namespace spillway::kernels {
namespace {

using test::same_bits;

constexpr std::int64_t kLengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 31, 1023, 1024, 1025, 5000};

// Calls body(turn) for each thread of a launch of `threads`.
template <class Body>
void launch(std::int64_t threads, const Body& body) {
  for (std::int64_t i = 0; i < threads; ++i) body(cuda::Turn{i, threads});
}

// ---- sharing out ----------------------------------------------------------------------------------------------------

TEST(CudaShares, EveryElementIsTakenOnceWhateverTheAlignment) {
  alignas(16) static float memory[64];
  alignas(8) static std::uint16_t halves[64];
  for (std::int64_t a = 0; a < 5; ++a) {
    for (std::int64_t b = 0; b < 5; ++b) {
      for (std::int64_t count : kLengths) {
        const cuda::Shares shares = cuda::share_out(count, {{memory + a, 4}, {nullptr, 4}, {halves + b, 2}});
        std::vector<int> taken(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < shares.quads; ++i) {
          const std::int64_t first = shares.quad(i);
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory + a + first) % 16, 0u);
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(halves + b + first) % 8, 0u);
          for (std::int64_t j = 0; j < cuda::kQuad; ++j) ++taken.at(static_cast<std::size_t>(first + j));
        }
        for (std::int64_t i = 0; i < shares.singles(); ++i) ++taken.at(static_cast<std::size_t>(shares.single(i)));
        EXPECT_EQ(taken, std::vector<int>(static_cast<std::size_t>(count), 1)) << a << " " << b << " " << count;
        EXPECT_EQ(shares.quads > 0, a % 4 == b % 4 && count >= (4 - a % 4) % 4 + 4) << a << " " << b << " " << count;
      }
    }
  }
}

TEST(CudaShares, LaunchesAreNeverEmptyNorEndless) {
  EXPECT_EQ(cuda::blocks_for(std::int64_t{0}), 1u);
  EXPECT_EQ(cuda::blocks_for(std::int64_t{1}), 1u);
  EXPECT_EQ(cuda::blocks_for(std::int64_t{256}), 1u);
  EXPECT_EQ(cuda::blocks_for(std::int64_t{257}), 2u);
  EXPECT_EQ(cuda::blocks_for(std::int64_t{1} << 40), static_cast<unsigned>(cuda::kMostBlocks));
  EXPECT_EQ(cuda::blocks_for(std::numeric_limits<std::int64_t>::max()), static_cast<unsigned>(cuda::kMostBlocks));
  EXPECT_EQ(cuda::blocks_for(cuda::Shares{0, 1000, 4001}), 4u);
  // Beyond 2^31 elements: no number of an element is cut to 32 bits.
  const cuda::Shares large{3, (std::int64_t{1} << 33), (std::int64_t{1} << 35) + 5};
  EXPECT_EQ(large.quad(large.quads - 1), (std::int64_t{1} << 35) - 1);
  EXPECT_EQ(large.singles(), 5);
  EXPECT_EQ(large.single(4), (std::int64_t{1} << 35) + 4);
}

// ---- optimizers -----------------------------------------------------------------------------------------------------

struct Arrays {
  std::vector<float> p, s0, s1;
  std::vector<std::uint32_t> copy;  // room for any element type
};

Arrays arrays_of(const test::Problem& problem) {
  return {problem.p, problem.s0, problem.s1, std::vector<std::uint32_t>(problem.size(), 0xabababab)};
}

template <class Optimizer, class Scalars>
Arrays run(const Scalars& scalars, const test::Problem& problem, const test::Typed& g, std::int64_t offset,
           Element copy_type, std::int64_t threads) {
  Arrays out = arrays_of(problem);
  void* copy = copy_type == Element::none ? nullptr : out.copy.data();
  const auto count = static_cast<std::int64_t>(problem.size()) - offset;
  const cuda::UpdateSpan span{out.p.data() + offset,
                              {out.s0.data() + offset, out.s1.data() + offset},
                              g.at(static_cast<std::size_t>(offset)),
                              copy,
                              g.type,
                              copy_type};
  const cuda::Shares shares = cuda::share_out(
      count, {{span.p, 4}, {span.g, cuda::element_bytes(g.type)}, {copy, cuda::element_bytes(copy_type)}});
  launch(threads, [&](cuda::Turn turn) { cuda::update_thread<Optimizer>(scalars, span, shares, turn); });
  return out;
}

template <class Optimizer, class Scalars, class Kernel>
void expect_equals_cpu(const Scalars& scalars, const Kernel& kernel) {
  for (const test::Problem& problem :
       {test::ordinary_problem(1500, 1), test::wild_problem(997, 2), test::special_problem()}) {
    for (Element g_type : test::kGradientTypes) {
      const test::Typed g = test::round_to(g_type, problem.g);
      for (Element copy_type : test::kCopyTypes) {
        for (std::int64_t offset : {0, 1, 4}) {
          Arrays expected = arrays_of(problem);
          void* copy = copy_type == Element::none ? nullptr : expected.copy.data();
          kernel(scalars, expected.p.data() + offset, expected.s0.data() + offset, expected.s1.data() + offset,
                 g.at(static_cast<std::size_t>(offset)), g_type, copy, copy_type,
                 static_cast<std::int64_t>(problem.size()) - offset);
          const Arrays actual = run<Optimizer>(scalars, problem, g, offset, copy_type, 96);
          ASSERT_TRUE(same_bits(actual.p, expected.p));
          ASSERT_TRUE(same_bits(actual.s0, expected.s0));
          ASSERT_TRUE(same_bits(actual.s1, expected.s1));
          const auto halves = [](const Arrays& a) {
            return std::span(reinterpret_cast<const std::uint16_t*>(a.copy.data()), a.copy.size() * 2);
          };
          if (copy_type != Element::none && copy_type != Element::f32) {
            ASSERT_TRUE(same_bits(halves(actual), halves(expected), copy_type));
          }
        }
      }
    }
  }
}

TEST(CudaUpdate, EqualsTheCpuKernels) {
  const CpuKernels& cpu = cpu_kernels();
  for (bool decoupled : {true, false}) {
    expect_equals_cpu<Adam>(
        adam_scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled, 3, 0.5f),
        [&](auto& s, float* p, float* m, float* v, auto... rest) { cpu.adam(s, p, m, v, rest...); });
  }
  expect_equals_cpu<Adagrad>(adagrad_scalars(1e-2, 0.1, 1e-10, 0.1, 3, 0.5f),
                             [&](auto& s, float* p, float* h, float*, auto... rest) { cpu.adagrad(s, p, h, rest...); });
  expect_equals_cpu<Lion>(lion_scalars(1e-4, 0.9, 0.99, 0.1, 0.5f),
                          [&](auto& s, float* p, float* m, float*, auto... rest) { cpu.lion(s, p, m, rest...); });
  for (std::int64_t step : {1, 2}) {
    expect_equals_cpu<SgdMomentum>(
        sgd_scalars(1e-2, 0.9, 0.1, 0.1, step == 2, step, 0.5f),
        [&](auto& s, float* p, float* b, float*, auto... rest) { cpu.sgd(s, p, b, rest...); });
  }
  expect_equals_cpu<Sgd>(sgd_scalars(1e-2, 0, 0, 0.1, false, 1, 0.5f),
                         [&](auto& s, float* p, float* b, float*, auto... rest) { cpu.sgd(s, p, b, rest...); });
}

TEST(CudaUpdate, WritesNothingBeyondItsElements) {
  const test::Problem problem = test::ordinary_problem(64, 3);
  const test::Typed g = test::round_to(Element::f32, problem.g);
  for (std::int64_t count = 0; count < 40; ++count) {
    Arrays arrays = arrays_of(problem);
    const cuda::UpdateSpan span{
        arrays.p.data() + 2, {arrays.s0.data() + 2, arrays.s1.data() + 2}, g.at(2), nullptr, Element::f32,
        Element::none};
    const cuda::Shares shares = cuda::share_out(count, {{span.p, 4}});
    launch(7, [&](cuda::Turn turn) {
      cuda::update_thread<Adam>(adam_scalars(1, 0.9, 0.999, 1e-8, 0.1, true, 1, 1), span, shares, turn);
    });
    for (std::size_t i = 0; i < problem.size(); ++i) {
      const bool inside = i >= 2 && i < 2 + static_cast<std::size_t>(count);
      EXPECT_EQ(arrays.p[i] != problem.p[i], inside) << i << " of " << count;
    }
  }
}

// ---- conversions ----------------------------------------------------------------------------------------------------

TEST(CudaConversions, EqualTheCpuKernels) {
  const CpuKernels& cpu = cpu_kernels();
  const test::Problem problem = test::wild_problem(3001, 4);
  for (Element type : test::kGradientTypes) {
    const test::Typed source = test::round_to(type, problem.g);
    for (std::int64_t offset : {0, 1, 3}) {
      const auto count = static_cast<std::int64_t>(problem.size()) - offset;
      const void* from = source.at(static_cast<std::size_t>(offset));
      std::vector<float> expected = problem.p, actual = problem.p;
      const cuda::Shares both = cuda::share_out(count, {{actual.data(), 4}, {from, cuda::element_bytes(type)}});
      cpu.accumulate(expected.data(), from, type, count);
      const cuda::AccumulateBody sum{actual.data(), Element::f32, from, type};
      launch(33, [&](cuda::Turn turn) { cuda::for_shares(both, turn, sum); });
      EXPECT_TRUE(same_bits(actual, expected));
      cpu.widen(expected.data(), from, type, count);
      const cuda::WidenBody wide{actual.data(), from, type};
      launch(33, [&](cuda::Turn turn) { cuda::for_shares(both, turn, wide); });
      EXPECT_TRUE(same_bits(actual, expected));
      if (type == Element::f32) continue;
      std::vector<std::uint16_t> rounded(problem.size()), narrowed(problem.size());
      cpu.narrow(rounded.data() + offset, type, problem.p.data(), count);
      const cuda::Shares shares = cuda::share_out(count, {{narrowed.data() + offset, 2}, {problem.p.data(), 4}});
      const cuda::NarrowBody body{narrowed.data() + offset, type, problem.p.data()};
      launch(33, [&](cuda::Turn turn) { cuda::for_shares(shares, turn, body); });
      EXPECT_TRUE(same_bits(narrowed, rounded, type));
      // A sum kept in 16 bits: widened, added, rounded.
      std::vector<float> sums(problem.size());
      cpu.widen(sums.data(), rounded.data() + offset, type, count);
      cpu.accumulate(sums.data(), from, type, count);
      cpu.narrow(rounded.data() + offset, type, sums.data(), count);
      const cuda::AccumulateBody half{narrowed.data() + offset, type, from, type};
      launch(33, [&](cuda::Turn turn) { cuda::for_shares(shares, turn, half); });
      EXPECT_TRUE(same_bits(narrowed, rounded, type));
    }
  }
}

// ---- norm -----------------------------------------------------------------------------------------------------------

// A warp's exchange: thread j gets what thread j + width has, and itself where there is none.
double warp_sum(const test::Typed& values, std::int64_t begin, std::int64_t count) {
  double lanes[cuda::kWarp];
  for (std::int64_t j = 0; j < cuda::kWarp; ++j) {
    lanes[j] = cuda::partial_square_sum(values.data(), values.type, begin, count, j);
  }
  for (std::int64_t width = cuda::kWarp / 2; width > 0; width /= 2) {
    double next[cuda::kWarp];
    for (std::int64_t j = 0; j < cuda::kWarp; ++j) next[j] = lanes[j] + lanes[j + width < cuda::kWarp ? j + width : j];
    std::copy(next, next + cuda::kWarp, lanes);
  }
  return lanes[0];
}

TEST(CudaSquareSums, EqualTheCpuKernels) {
  for (const test::Problem& problem : {test::ordinary_problem(5000, 5), test::wild_problem(5000, 6)}) {
    for (Element type : test::kGradientTypes) {
      const test::Typed values = test::round_to(type, problem.g);
      for (std::int64_t count : kLengths) {
        std::vector<double> expected(static_cast<std::size_t>(cuda::grains_of(count))), actual(expected.size());
        cpu_kernels().grain_square_sums(expected.data(), values.wide.data(), count);
        for (std::size_t i = 0; i < actual.size(); ++i) {
          const auto grain = static_cast<std::int64_t>(i);
          actual[i] = warp_sum(values, grain * kGrain, cuda::grain_size(count, grain));
        }
        EXPECT_TRUE(same_bits(actual, expected)) << count;
      }
    }
  }
}

}  // namespace
}  // namespace spillway::kernels
