// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/allocation_counter.h"
#include "kernels/bit_equality.h"
#include "kernels/exact_sum.h"
#include "kernels/format_reference.h"

namespace spillway::test {
namespace {

using kernels::Element;
using kernels::StateFormat;
using kernels::StateKind;

TEST(Allocation, KernelsAndExactSumsAllocateAndLockNothing) {
  constexpr std::int64_t kCount = 5 * kernels::kGrain + 17;
  const Problem problem = ordinary_problem(kCount, 16);
  const Typed gradients = round_to(Element::bf16, problem.g);
  for (const kernels::CpuKernels* set : kernel_sets()) {
    Problem state = problem;
    std::vector<std::uint16_t> copy(kCount);
    std::vector<double> sums(6);
    kernels::ExactSum sum;
    PackedState m(StateFormat::bf16, StateKind::any_sign, kCount), v(StateFormat::block8, StateKind::square, kCount);
    std::vector<std::uint16_t> working(kCount), low(kCount);
    kernels::UpdateArrays arrays;
    arrays.p = {nullptr, working.data(), low.data()};
    arrays.states[0] = m.array(0);
    arrays.states[1] = v.array(0);
    arrays.g = state.g.data();
    arrays.count = kCount;
    PackedState m_twin = m, m_log = m, v_log = m;
    std::vector<std::uint16_t> working_log(kCount), low_log(kCount);
    kernels::UpdateLog log;
    log.p = {nullptr, working_log.data(), low_log.data()};
    log.states[0] = m_log.array(0);
    log.states[1] = v_log.array(0);
    const auto scalars = kernels::adam_scalars(1e-3, 0.9, 0.999, 1e-8, 0, true, 1, 1);
    const std::int64_t before = allocation_count(), locks_before = lock_count();
    for (const Optimizer& optimizer : optimizers()) {
      optimizer.kernel(*set, Hyper{}, 2, 1, state.p.data(), state.s0.data(), state.s1.data(), gradients.data(),
                       Element::bf16, copy.data(), Element::f16, kCount);
    }
    set->adam_packed(scalars, arrays);
    arrays.states[1] = arrays.states[0] = m.array(0);
    arrays.states[1].data = m_twin.halves.data();
    set->adam_packed(scalars, arrays);
    set->adam_logged(scalars, arrays, log);
    set->widen(state.g.data(), gradients.data(), Element::bf16, kCount);
    set->accumulate(state.g.data(), gradients.data(), Element::bf16, kCount);
    set->narrow(copy.data(), Element::bf16, state.g.data(), kCount);
    set->grain_square_sums(sums.data(), state.g.data(), kCount);
    for (double value : sums) sum.add(value);
    const double total = sum.value();
    EXPECT_EQ(allocation_count(), before) << set->name;
    EXPECT_EQ(lock_count(), locks_before) << set->name;
    EXPECT_GT(total, 0);
    ::operator delete(::operator new(1));  // calls, which compilers may not leave out as they may new-expressions
    EXPECT_GT(allocation_count(), before) << "the counter counts nothing";
    void* memory = std::malloc(1);
    std::mutex mutex;
    { const std::scoped_lock lock(mutex); }
    std::free(memory);
    EXPECT_EQ(lock_count() > locks_before, locks_are_counted());
  }
}

}  // namespace
}  // namespace spillway::test
