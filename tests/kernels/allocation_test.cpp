// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "kernels/bit_equality.h"
#include "kernels/exact_sum.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}

// Every allocation of this program is counted.
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace spillway::test {
namespace {

using kernels::Element;

TEST(Allocation, KernelsAndExactSumsAllocateNothing) {
  constexpr std::int64_t kCount = 5 * kernels::kGrain + 17;
  const Problem problem = ordinary_problem(kCount, 16);
  const Typed gradients = round_to(Element::bf16, problem.g);
  for (const kernels::CpuKernels* set : kernel_sets()) {
    Problem state = problem;
    std::vector<std::uint16_t> copy(kCount);
    std::vector<double> sums(6);
    kernels::ExactSum sum;
    const std::int64_t before = allocations.load();
    for (const Optimizer& optimizer : optimizers()) {
      optimizer.kernel(*set, Hyper{}, 2, 1, state.p.data(), state.s0.data(), state.s1.data(), gradients.data(),
                       Element::bf16, copy.data(), Element::f16, kCount);
    }
    set->widen(state.g.data(), gradients.data(), Element::bf16, kCount);
    set->accumulate(state.g.data(), gradients.data(), Element::bf16, kCount);
    set->narrow(copy.data(), Element::bf16, state.g.data(), kCount);
    set->grain_square_sums(sums.data(), state.g.data(), kCount);
    for (double value : sums) sum.add(value);
    const double total = sum.value();
    EXPECT_EQ(allocations.load(), before) << set->name;
    EXPECT_GT(total, 0);
    const auto probe = std::make_unique<int>(1);
    EXPECT_GT(allocations.load(), before) << "the counter counts nothing";
  }
}

}  // namespace
}  // namespace spillway::test
