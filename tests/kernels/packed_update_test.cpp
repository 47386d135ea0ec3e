// SPDX-License-Identifier: Apache-2.0
// Updates of masters and states in their small forms: equal, byte for byte, to unpacking, updating and packing by the
// references.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/bit_equality.h"
#include "kernels/format_reference.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;
using kernels::StateFormat;

constexpr StateFormat kFormats[] = {StateFormat::f32, StateFormat::bf16, StateFormat::block8};
constexpr std::uint64_t kSeed = 99;
constexpr std::int64_t kFirst = 7 * kernels::kGrain;  // where the arrays stand among all parameters

struct PackedModel {
  bool split = false;
  std::vector<float> p;
  std::vector<std::uint16_t> working, low;
  std::vector<PackedState> states;
  std::vector<std::uint16_t> copy;
};

PackedModel make_model(const Optimizer& optimizer, const Problem& problem, StateFormat format, bool split) {
  PackedModel model{split, problem.p, {}, {}, {}, std::vector<std::uint16_t>(problem.size())};
  for (float value : problem.p) {
    model.working.push_back(split_working_reference(value));
    model.low.push_back(split_low_reference(value));
  }
  for (kernels::StateKind kind : optimizer.states) {
    model.states.emplace_back(format, kind, problem.size());
    model.states.back().pack(std::vector<float>(problem.size(), 0.0f), kSeed, 0, kFirst);
  }
  return model;
}

void step_by_reference(const Optimizer& optimizer, PackedModel& model, const Typed& gradients, std::int64_t step) {
  std::vector<float> states[2] = {std::vector<float>(model.p.size()), std::vector<float>(model.p.size())};
  for (std::size_t k = 0; k < model.states.size(); ++k) states[k] = model.states[k].unpack();
  optimizer.reference(Hyper{}, step, 0.5f, model.p, states[0], states[1], gradients.wide);
  for (std::size_t k = 0; k < model.states.size(); ++k) model.states[k].pack(states[k], kSeed, step, kFirst);
  for (std::size_t i = 0; i < model.p.size(); ++i) {
    model.working[i] = split_working_reference(model.p[i]);
    model.low[i] = split_low_reference(model.p[i]);
    model.copy[i] = narrow_reference(model.p[i], Element::f16);
  }
}

void step_by_kernel(const CpuKernels& set, const Optimizer& optimizer, PackedModel& model, const Typed& gradients,
                    std::int64_t step, int pieces) {
  const auto count = static_cast<std::int64_t>(model.p.size());
  const std::int64_t grains = (count + kernels::kGrain - 1) / kernels::kGrain;
  for (int k = 0; k < pieces; ++k) {
    const std::int64_t from = grains * k / pieces * kernels::kGrain;
    const std::int64_t to = k + 1 == pieces ? count : grains * (k + 1) / pieces * kernels::kGrain;
    const auto at = static_cast<std::size_t>(from);
    kernels::UpdateArrays arrays;
    arrays.p = model.split ? kernels::MasterArray{nullptr, &model.working[0] + at, &model.low[0] + at}
                           : kernels::MasterArray{&model.p[0] + at, nullptr, nullptr};
    for (std::size_t s = 0; s < model.states.size(); ++s) arrays.states[s] = model.states[s].array(at);
    arrays.g = gradients.half.empty() ? static_cast<const void*>(&gradients.wide[0] + at) : &gradients.half[0] + at;
    arrays.g_type = gradients.type;
    arrays.copy = &model.copy[0] + at;
    arrays.copy_type = Element::f16;
    arrays.count = to - from;
    arrays.first = kFirst + from;
    arrays.key = kernels::rounding_key(kSeed, step);
    optimizer.packed(set, Hyper{}, step, 0.5f, arrays);
  }
}

testing::AssertionResult same_model(const PackedModel& actual, const PackedModel& expected) {
  if (actual.split) {
    if (actual.working != expected.working || actual.low != expected.low) {
      return testing::AssertionFailure() << "the split master differs";
    }
  } else if (auto same = same_bits(actual.p, expected.p); !same) {
    return same << " in p";
  }
  if (actual.copy != expected.copy) return testing::AssertionFailure() << "the copy differs";
  for (std::size_t k = 0; k < actual.states.size(); ++k) {
    const PackedState &a = actual.states[k], &b = expected.states[k];
    if (auto same = same_bits(a.wide, b.wide); !same) return same << " in state " << k;
    if (a.halves != b.halves) return testing::AssertionFailure() << "halves of state " << k << " differ";
    if (a.codes != b.codes) return testing::AssertionFailure() << "codes of state " << k << " differ";
    if (auto same = same_bits(a.scales, b.scales); !same) return same << " in scales of state " << k;
  }
  return testing::AssertionSuccess();
}

class PackedUpdate : public testing::TestWithParam<Optimizer> {};

TEST_P(PackedUpdate, EqualsTheReferenceOverStepsInAnyNumberOfPieces) {
  const Problem problem = ordinary_problem(5 * kernels::kGrain + 77, 30);
  for (StateFormat format : kFormats) {
    for (bool split : {false, true}) {
      const Typed gradients = round_to(split ? Element::bf16 : Element::f32, problem.g);
      PackedModel expected = make_model(GetParam(), problem, format, split);
      std::vector<PackedModel> actual;
      for (std::size_t i = 0; i < 3 * kernel_sets().size(); ++i) actual.push_back(expected);
      for (std::int64_t step = 1; step <= 12; ++step) {
        step_by_reference(GetParam(), expected, gradients, step);
        std::size_t i = 0;
        for (const CpuKernels* set : kernel_sets()) {
          for (int pieces : {1, 2, 5}) {
            step_by_kernel(*set, GetParam(), actual[i], gradients, step, pieces);
            ASSERT_TRUE(same_model(actual[i++], expected))
                << set->name << ", " << pieces << " pieces, format " << static_cast<int>(format) << ", split " << split
                << ", step " << step;
          }
        }
      }
    }
  }
}

TEST_P(PackedUpdate, EveryShortLength) {
  for (std::size_t count = 1; count <= 257; ++count) {
    const Problem problem = ordinary_problem(count, static_cast<unsigned>(count));
    const Typed gradients = round_to(Element::bf16, problem.g);
    for (StateFormat format : kFormats) {
      PackedModel expected = make_model(GetParam(), problem, format, true);
      for (const CpuKernels* set : kernel_sets()) {
        PackedModel actual = expected;
        step_by_kernel(*set, GetParam(), actual, gradients, 1, 1);
        PackedModel wanted = expected;
        step_by_reference(GetParam(), wanted, gradients, 1);
        ASSERT_TRUE(same_model(actual, wanted)) << set->name << ", length " << count;
      }
    }
  }
}

// Every value that bf16 gradients can have: infinities, and NaN with every payload.
TEST_P(PackedUpdate, ANanStaysOneWhateverItsPayload) {
  Problem problem = ordinary_problem(1 << 16, 33);
  for (std::size_t i = 0; i < problem.g.size(); ++i) {
    problem.g[i] = widen_reference(static_cast<std::uint16_t>(i), Element::bf16);
  }
  Typed gradients = round_to(Element::bf16, problem.g);
  for (std::size_t i = 0; i < problem.g.size(); ++i) gradients.half[i] = static_cast<std::uint16_t>(i);
  for (const CpuKernels* set : kernel_sets()) {
    for (bool split : {false, true}) {
      PackedModel model = make_model(GetParam(), problem, StateFormat::bf16, split);
      step_by_kernel(*set, GetParam(), model, gradients, 1, 1);
      for (std::size_t i = 0; i < problem.g.size(); ++i) {
        if (!std::isnan(problem.g[i])) continue;
        ASSERT_TRUE(std::isnan(split ? join_reference(model.working[i], model.low[i]) : model.p[i])) << set->name << i;
        for (const PackedState& state : model.states) {
          ASSERT_TRUE(std::isnan(widen_reference(state.halves[i], Element::bf16))) << set->name << ", gradient " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PackedUpdate, testing::ValuesIn(optimizers().begin(), optimizers().end()),
                         [](const auto& info) { return info.param.name; });

// ---- what the forms are worth --------------------------------------------------------------------

/// Mean square of p after AdamW steps on sum(p^2) / 2 with noisy gradients, by the fastest set.
double loss_after(int steps, StateFormat format, bool split) {
  Optimizer adam = optimizers()[0];
  const Problem problem = ordinary_problem(4 * kernels::kGrain, 31);
  PackedModel model = make_model(adam, problem, format, split);
  std::vector<float> p = problem.p;
  for (std::int64_t step = 1; step <= steps; ++step) {
    const auto noise = ordinary_problem(p.size(), static_cast<unsigned>(1000 + step)).s0;
    std::vector<float> g(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) g[i] = p[i] + noise[i];
    step_by_kernel(kernels::cpu_kernels(), adam, model, round_to(Element::f32, g), step, 1);
    if (split) {
      for (std::size_t i = 0; i < p.size(); ++i) p[i] = join_reference(model.working[i], model.low[i]);
    } else {
      p = model.p;
    }
  }
  double sum = 0;
  for (float value : p) sum += static_cast<double>(value) * static_cast<double>(value);
  return sum / static_cast<double>(p.size());
}

TEST(SmallForms, DescendAsFp32Does) {
  const double exact = loss_after(200, StateFormat::f32, false);
  EXPECT_EQ(loss_after(200, StateFormat::f32, true), exact) << "a split master is exact";
  for (StateFormat format : {StateFormat::bf16, StateFormat::block8}) {
    EXPECT_NEAR(loss_after(200, format, true) / exact, 1, 0.02) << static_cast<int>(format);
  }
}

// Rounded to nearest, a second moment in bf16 would stand still: one step's change is below half a unit.
TEST(SmallForms, StochasticRoundingLetsASlowSecondMomentMove) {
  constexpr std::size_t kCount = 8 * kernels::kGrain;
  Optimizer adam = optimizers()[0];
  Problem problem = ordinary_problem(kCount, 32);
  PackedModel model = make_model(adam, problem, StateFormat::bf16, false);
  model.states[1].pack(std::vector<float>(kCount, 1.0f), kSeed, 0, kFirst);
  const Typed gradients = round_to(Element::f32, std::vector<float>(kCount, 0.0f));
  for (std::int64_t step = 1; step <= 100; ++step)
    step_by_kernel(kernels::cpu_kernels(), adam, model, gradients, step, 1);
  double mean = 0;
  for (float value : model.states[1].unpack()) mean += value / kCount;
  EXPECT_NEAR(mean, std::pow(0.999, 100), 1e-3);
}

}  // namespace
}  // namespace spillway::test
