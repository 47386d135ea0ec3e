// SPDX-License-Identifier: Apache-2.0
// Every optimizer, on every kernel set that runs here, against the scalar reference: equal bits.

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "kernels/bit_equality.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;

constexpr std::size_t kOffsets = 16;

/// An array at a chosen offset inside a buffer whose other elements must stay as they are.
template <class T>
class Placed {
 public:
  Placed(std::span<const T> values, std::size_t offset)
      : offset_(offset), count_(values.size()), buffer_(values.size() + 2 * kOffsets, canary()) {
    std::copy(values.begin(), values.end(), buffer_.begin() + static_cast<std::ptrdiff_t>(offset_));
  }
  T* data() { return buffer_.data() + offset_; }
  std::span<const T> values() const { return std::span(buffer_).subspan(offset_, count_); }
  bool rest_untouched() const {
    for (std::size_t i = 0; i < buffer_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + count_) && buffer_[i] != canary()) return false;
    }
    return true;
  }

 private:
  static T canary() { return static_cast<T>(12345); }

  std::size_t offset_, count_;
  std::vector<T> buffer_;
};

/// One call of a kernel on arrays that start anywhere.
struct Call {
  const CpuKernels& set;
  const Optimizer& optimizer;
  const Problem& problem;
  const Typed& gradients;
  const UpdateOutcome& expected;
  std::int64_t step;
  float factor;

  template <class G, class C>
  testing::AssertionResult run(std::span<const G> g_all, std::span<const C> copy_expected, std::size_t count,
                               std::size_t offset) const {
    // Each array has an offset of its own, so that no two are aligned alike.
    Placed<float> p(std::span(problem.p).first(count), offset);
    Placed<float> s0(std::span(problem.s0).first(count), (offset * 3 + 1) % kOffsets);
    Placed<float> s1(std::span(problem.s1).first(count), (offset * 5 + 2) % kOffsets);
    Placed<G> g(g_all.first(count), (offset * 7 + 3) % kOffsets);
    const std::vector<C> zeros(copy_expected.empty() ? 0 : count, C{});
    Placed<C> copy(zeros, (offset * 11 + 5) % kOffsets);
    optimizer.kernel(set, Hyper{}, step, factor, p.data(), s0.data(), s1.data(), g.data(), gradients.type,
                     copy_expected.empty() ? nullptr : copy.data(), expected.copy.type,
                     static_cast<std::int64_t>(count));
    if (auto same = same_bits(p.values(), std::span(expected.p).first(count)); !same) return same << " in p";
    if (auto same = same_bits(s0.values(), std::span(expected.s0).first(count)); !same) return same << " in s0";
    if (auto same = same_bits(s1.values(), std::span(expected.s1).first(count)); !same) return same << " in s1";
    if (auto same = same_copy(copy.values(), copy_expected.first(zeros.size())); !same) return same << " in the copy";
    const bool clean = p.rest_untouched() && s0.rest_untouched() && s1.rest_untouched() && copy.rest_untouched();
    if (!clean) return testing::AssertionFailure() << "wrote outside of its " << count << " elements";
    return testing::AssertionSuccess();
  }

  testing::AssertionResult same_copy(std::span<const float> actual, std::span<const float> wanted) const {
    return same_bits(actual, wanted);
  }
  testing::AssertionResult same_copy(std::span<const std::uint16_t> actual,
                                     std::span<const std::uint16_t> wanted) const {
    return same_bits(actual, wanted, expected.copy.type);
  }

  template <class G>
  testing::AssertionResult with_copy(std::span<const G> g, std::size_t count, std::size_t offset) const {
    if (expected.copy.type == Element::none) return run(g, std::span<const float>(), count, offset);
    if (expected.copy.type == Element::f32) return run(g, std::span<const float>(expected.copy.wide), count, offset);
    return run(g, std::span<const std::uint16_t>(expected.copy.half), count, offset);
  }

  testing::AssertionResult operator()(std::size_t count, std::size_t offset) const {
    if (gradients.half.empty()) return with_copy(std::span<const float>(gradients.wide), count, offset);
    return with_copy(std::span<const std::uint16_t>(gradients.half), count, offset);
  }
};

class OptimizerTest : public testing::TestWithParam<Optimizer> {};

std::string describe(const CpuKernels& set, Element g_type, Element copy_type) {
  return std::string(set.name) + ", gradient type " + std::to_string(static_cast<int>(g_type)) + ", copy type " +
         std::to_string(static_cast<int>(copy_type));
}

TEST_P(OptimizerTest, EveryLengthAlignmentAndType) {
  const Problem problem = ordinary_problem(258, 1);
  for (Element g_type : kGradientTypes) {
    const Typed gradients = round_to(g_type, problem.g);
    for (Element copy_type : kCopyTypes) {
      const UpdateOutcome expected = expected_update(GetParam(), problem, gradients, copy_type, 3, 0.37f);
      for (const CpuKernels* set : kernel_sets()) {
        const Call call{*set, GetParam(), problem, gradients, expected, 3, 0.37f};
        for (std::size_t count = 0; count <= 257; ++count) {
          for (std::size_t offset = 0; offset < kOffsets; ++offset) {
            ASSERT_TRUE(call(count, offset)) << describe(*set, g_type, copy_type) << ", length " << count;
          }
        }
      }
    }
  }
}

TEST_P(OptimizerTest, LongArraysOfAnyBits) {
  const Problem problem = wild_problem(1'000'003, 2);
  const std::pair<Element, Element> types[] = {{Element::f32, Element::none},
                                               {Element::f32, Element::f32},
                                               {Element::bf16, Element::bf16},
                                               {Element::f16, Element::f16}};
  for (auto [g_type, copy_type] : types) {
    const Typed gradients = round_to(g_type, problem.g);
    const UpdateOutcome expected = expected_update(GetParam(), problem, gradients, copy_type, 7, 1.0f);
    for (const CpuKernels* set : kernel_sets()) {
      const Call call{*set, GetParam(), problem, gradients, expected, 7, 1.0f};
      ASSERT_TRUE(call(problem.size(), 3)) << describe(*set, g_type, copy_type);
    }
  }
}

TEST_P(OptimizerTest, SpecialValuesInEveryCombination) {
  const Problem problem = special_problem();
  for (Element g_type : kGradientTypes) {
    const Typed gradients = round_to(g_type, problem.g);
    for (float factor : {1.0f, 0.125f}) {
      const UpdateOutcome expected = expected_update(GetParam(), problem, gradients, Element::f16, 1, factor);
      for (const CpuKernels* set : kernel_sets()) {
        const Call call{*set, GetParam(), problem, gradients, expected, 1, factor};
        ASSERT_TRUE(call(problem.size(), 0)) << describe(*set, g_type, Element::f16);
      }
    }
  }
}

TEST_P(OptimizerTest, StepsUpToAMillion) {
  const Problem problem = ordinary_problem(1000, 3);
  const Typed gradients = round_to(Element::f32, problem.g);
  for (std::int64_t step : {1, 2, 5, 10, 100, 1000, 10'000, 100'000, 1'000'000}) {
    const UpdateOutcome expected = expected_update(GetParam(), problem, gradients, Element::bf16, step, 1.0f);
    for (const CpuKernels* set : kernel_sets()) {
      const Call call{*set, GetParam(), problem, gradients, expected, step, 1.0f};
      ASSERT_TRUE(call(problem.size(), 0)) << set->name << ", step " << step;
    }
  }
}

// ---- many steps, split at grains -----------------------------------------------------------------

constexpr int kSteps = 50;

std::int64_t step_number(int i) {
  return i < 10 ? i + 1 : i + 6;
}  // jumps from 10 to 16

Hyper hyper_of(int i) {
  Hyper hyper;
  if (i >= 30) hyper.beta1 = 0.8, hyper.beta2 = 0.95, hyper.lr = 3e-4;
  return hyper;
}

std::span<const float> gradients_of(const Problem& problem, int i, std::vector<float>& storage) {
  storage = problem.g;
  std::rotate(storage.begin(), storage.begin() + i, storage.end());
  return storage;
}

/// Cut points of `pieces` parts at multiples of the grain.
std::vector<std::int64_t> cuts(std::int64_t count, int pieces) {
  const std::int64_t grains = (count + kernels::kGrain - 1) / kernels::kGrain;
  std::vector<std::int64_t> points;
  for (int i = 0; i < pieces; ++i) points.push_back(grains * i / pieces * kernels::kGrain);
  points.push_back(count);
  return points;
}

Problem run_split(const Optimizer& optimizer, const CpuKernels& set, const Problem& start, int pieces, bool threads) {
  Problem state = start;
  std::vector<float> g;
  const auto points = cuts(static_cast<std::int64_t>(start.size()), pieces);
  for (int i = 0; i < kSteps; ++i) {
    gradients_of(start, i, g);
    const auto piece = [&](std::size_t k) {
      const std::int64_t from = points[k];
      optimizer.kernel(set, hyper_of(i), step_number(i), 0.5f, &state.p[0] + from, &state.s0[0] + from,
                       &state.s1[0] + from, &g[0] + from, Element::f32, nullptr, Element::none, points[k + 1] - from);
    };
    std::vector<std::thread> workers;
    for (std::size_t k = 0; k + 1 < points.size(); ++k) {
      threads ? static_cast<void>(workers.emplace_back(piece, k)) : piece(k);
    }
    for (std::thread& worker : workers) worker.join();
  }
  return state;
}

TEST_P(OptimizerTest, FiftyStepsInPiecesAndThreads) {
  Problem start = ordinary_problem(20'011, 4);
  std::ranges::fill(start.s0, 0.0f);
  std::ranges::fill(start.s1, 0.0f);
  Problem expected = start;
  std::vector<float> g;
  for (int i = 0; i < kSteps; ++i) {
    GetParam().reference(hyper_of(i), step_number(i), 0.5f, expected.p, expected.s0, expected.s1,
                         gradients_of(start, i, g));
  }
  for (const CpuKernels* set : kernel_sets()) {
    const auto expect = [&](int pieces, bool threads) {
      const Problem state = run_split(GetParam(), *set, start, pieces, threads);
      const std::string how = fmt::format("{} in {} pieces{}", set->name, pieces, threads ? ", a thread each" : "");
      ASSERT_TRUE(same_bits(state.p, expected.p)) << how;
      ASSERT_TRUE(same_bits(state.s0, expected.s0)) << how;
      ASSERT_TRUE(same_bits(state.s1, expected.s1)) << how;
    };
    for (int pieces : {1, 2, 7}) expect(pieces, false);
    for (int threads = 1; threads <= 8; ++threads) expect(threads, true);
  }
}

// ---- nothing outside is read ---------------------------------------------------------------------

/// Memory that ends (or, `at_start`, begins) where the next byte faults.
class Guarded {
 public:
  Guarded(std::size_t bytes, bool at_start) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    inner_ = (bytes + page_ - 1) / page_ * page_;
    base_ = static_cast<char*>(mmap(nullptr, inner_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + page_, inner_, PROT_READ | PROT_WRITE);
    data_ = base_ + page_ + (at_start ? 0 : inner_ - bytes);
  }
  ~Guarded() { munmap(base_, inner_ + 2 * page_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  float* floats() { return reinterpret_cast<float*>(data_); }

 private:
  std::size_t page_, inner_;
  char* base_;
  char* data_;
};

TEST_P(OptimizerTest, ReadsNothingBeyondItsElements) {
  for (const CpuKernels* set : kernel_sets()) {
    for (std::size_t count : {1, 7, 16, 33, 255, 256, 257, 1025}) {
      for (bool at_start : {false, true}) {
        Guarded p(4 * count, at_start), s0(4 * count, at_start), s1(4 * count, at_start);
        Guarded g(2 * count, at_start), copy(2 * count, at_start);
        GetParam().kernel(*set, Hyper{}, 1, 1.0f, p.floats(), s0.floats(), s1.floats(), g.floats(), Element::bf16,
                          copy.floats(), Element::bf16, static_cast<std::int64_t>(count));
        // Everything was zero and has no reason to move; a fault would have ended the program.
        EXPECT_EQ(p.floats()[count - 1], 0.0f);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerTest, testing::ValuesIn(optimizers().begin(), optimizers().end()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway::test
