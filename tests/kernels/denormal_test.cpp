// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "kernels/bit_equality.h"
#include "kernels/denormal_mode.h"

namespace spillway::test {
namespace {

using kernels::Element;

#if defined(__SSE2__)

/// Flushes denormals on this thread, as frameworks may.
class Flushing {
 public:
  Flushing() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040); }
  ~Flushing() { __builtin_ia32_ldmxcsr(saved_); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
  unsigned saved_;
};

// The smallest normal number, halved by the gradient factor.
float halved(const kernels::CpuKernels& set) {
  const float gradient = 0x1p-126f;
  float p = 0, m = 0, v = 0;
  set.adam(kernels::adam_scalars(0, 0, 0, 1, 0, true, 1, 0.5f), &p, &m, &v, &gradient, Element::f32, nullptr,
           Element::none, 1);
  return m;
}

TEST(KeepDenormals, HoldsWhereTheThreadFlushesAndGivesTheModeBack) {
  for (const kernels::CpuKernels* set : kernel_sets()) {
    const Flushing flushing;
    const float before = halved(*set);
    float inside = 0;
    {
      const kernels::KeepDenormals keep;
      inside = halved(*set);
    }
    const float after = halved(*set);
    EXPECT_TRUE(same_bits(std::vector{before, inside, after}, std::vector{0.0f, 0x1p-127f, 0.0f})) << set->name;
  }
}

// Conversions of fp16 denormals go through normal numbers alone.
TEST(KeepDenormals, HalfConversionsDoNotNeedIt) {
  for (const kernels::CpuKernels* set : kernel_sets()) {
    const std::uint16_t smallest = 1;
    float wide = 0;
    std::uint16_t narrow = 0;
    {
      const Flushing flushing;
      set->widen(&wide, &smallest, Element::f16, 1);
      set->narrow(&narrow, Element::f16, &wide, 1);
    }
    EXPECT_EQ(wide, 0x1p-24f) << set->name;
    EXPECT_EQ(narrow, smallest) << set->name;
  }
}

#endif

}  // namespace
}  // namespace spillway::test
