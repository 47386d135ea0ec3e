// SPDX-License-Identifier: Apache-2.0
#include "kernels/bit_equality.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace spillway::test {
namespace {

using kernels::Element;

template <class T, class Same>
testing::AssertionResult compare(std::span<const T> actual, std::span<const T> expected, const Same& same) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << actual.size() << " elements instead of " << expected.size();
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (same(actual[i], expected[i])) continue;
    return testing::AssertionFailure() << "element " << i << " of " << actual.size() << ": " << actual[i]
                                       << " instead of " << expected[i];
  }
  return testing::AssertionSuccess();
}

bool is_nan(std::uint16_t value, Element type) {
  return (value & 0x7fff) > (type == Element::bf16 ? 0x7f80 : 0x7c00);
}

constexpr float kSpecials[] = {0.0f,
                               -0.0f,
                               std::numeric_limits<float>::denorm_min(),
                               -1e-40f,
                               std::numeric_limits<float>::min(),
                               1e-20f,
                               -6e-8f,
                               0.1f,
                               1.0f,
                               -1.0f,
                               65520.0f,
                               -3e10f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN()};

}  // namespace

testing::AssertionResult same_bits(std::span<const float> actual, std::span<const float> expected) {
  return compare(actual, expected, [](float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
  });
}

testing::AssertionResult same_bits(std::span<const double> actual, std::span<const double> expected) {
  return compare(actual, expected, [](double a, double b) {
    return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) || (std::isnan(a) && std::isnan(b));
  });
}

testing::AssertionResult same_bits(std::span<const std::uint16_t> actual, std::span<const std::uint16_t> expected,
                                   Element type) {
  return compare(actual, expected,
                 [type](std::uint16_t a, std::uint16_t b) { return a == b || (is_nan(a, type) && is_nan(b, type)); });
}

Typed round_to(Element type, std::span<const float> values) {
  Typed typed{type, {values.begin(), values.end()}, {}};
  if (type == Element::f32 || type == Element::none) return typed;
  for (float& value : typed.wide) {
    typed.half.push_back(narrow_reference(value, type));
    value = widen_reference(typed.half.back(), type);
  }
  return typed;
}

Problem ordinary_problem(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> magnitude(-8, 0);
  Problem problem;
  for (std::size_t i = 0; i < count; ++i) {
    problem.p.push_back(normal(generator));
    problem.g.push_back(normal(generator) * std::pow(10.0f, magnitude(generator)));
    problem.s0.push_back(0.1f * normal(generator));
    problem.s1.push_back(std::fabs(normal(generator)) * std::pow(10.0f, magnitude(generator)));
  }
  return problem;
}

Problem wild_problem(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  const auto any = [&] { return std::bit_cast<float>(static_cast<std::uint32_t>(generator())); };
  Problem problem;
  for (std::size_t i = 0; i < count; ++i) {
    problem.p.push_back(any());
    problem.s0.push_back(any());
    problem.s1.push_back(std::fabs(any()));
    problem.g.push_back(any());
  }
  return problem;
}

Problem special_problem() {
  Problem problem;
  for (float p : kSpecials) {
    for (float s0 : kSpecials) {
      for (float s1 : kSpecials) {
        for (float g : kSpecials) {
          problem.p.push_back(p);
          problem.s0.push_back(s0);
          problem.s1.push_back(s1);
          problem.g.push_back(g);
        }
      }
    }
  }
  return problem;
}

UpdateOutcome expected_update(const Optimizer& optimizer, const Problem& problem, const Typed& gradients,
                              Element copy_type, std::int64_t step, float factor) {
  UpdateOutcome outcome{problem.p, problem.s0, problem.s1, {}};
  optimizer.reference(Hyper{}, step, factor, outcome.p, outcome.s0, outcome.s1, gradients.wide);
  outcome.copy = round_to(copy_type, outcome.p);
  return outcome;
}

std::vector<const kernels::CpuKernels*> kernel_sets() {
  std::vector<const kernels::CpuKernels*> sets;
  for (std::string_view name : kernels::cpu_kernel_names()) sets.push_back(kernels::cpu_kernels(name));
  return sets;
}

}  // namespace spillway::test
