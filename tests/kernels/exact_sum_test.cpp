// SPDX-License-Identifier: Apache-2.0
#include "kernels/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

namespace spillway::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kLargest = std::numeric_limits<double>::max();

/// A non-negative integer in digits of 32 bits, by schoolbook rules; a double counts in units of 2^-1074.
class BigNumber {
 public:
  BigNumber() : digits_(80, 0) {}
  explicit BigNumber(double value) : BigNumber() { add(value); }

  void add(double value) {
    int exponent = 0;
    const double fraction = std::frexp(std::fabs(value), &exponent);
    // fraction * 2^53 is an integer for normal values; denormals have fewer bits below their last place.
    auto integer = static_cast<std::uint64_t>(std::ldexp(fraction, 53));
    int position = exponent - 53 + 1074;
    if (position < 0) integer >>= -position, position = 0;
    std::uint64_t carry = 0;
    const auto digit = static_cast<std::size_t>(position / 32);
    const unsigned __int128 placed = static_cast<unsigned __int128>(integer) << (position % 32);
    for (std::size_t i = digit; i < digits_.size(); ++i) {
      const std::size_t part = i - digit;
      const auto piece = part < 3 ? static_cast<std::uint32_t>(placed >> (32 * part)) : 0;
      const std::uint64_t sum = std::uint64_t{digits_[i]} + piece + carry;
      digits_[i] = static_cast<std::uint32_t>(sum);
      carry = sum >> 32;
    }
  }

  /// This minus a number that is not larger.
  BigNumber minus(const BigNumber& smaller) const {
    BigNumber result;
    std::int64_t borrow = 0;
    for (std::size_t i = 0; i < digits_.size(); ++i) {
      std::int64_t digit = std::int64_t{digits_[i]} - smaller.digits_[i] - borrow;
      borrow = digit < 0 ? 1 : 0;
      result.digits_[i] = static_cast<std::uint32_t>(digit + (borrow << 32));
    }
    return result;
  }

  std::strong_ordering operator<=>(const BigNumber& other) const {
    return std::lexicographical_compare_three_way(digits_.rbegin(), digits_.rend(), other.digits_.rbegin(),
                                                  other.digits_.rend());
  }
  bool operator==(const BigNumber&) const = default;

  /// The nearest double by search: the last one that is not above, then the closer of it and the next.
  double rounded() const {
    std::uint64_t low = 0, high = std::bit_cast<std::uint64_t>(kLargest);
    while (low < high) {
      const std::uint64_t middle = low + (high - low + 1) / 2;
      if (BigNumber(std::bit_cast<double>(middle)) <= *this) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const double below = std::bit_cast<double>(low), above = std::bit_cast<double>(low + 1);
    // 2^1024 stands in for infinity, as rounding has it.
    BigNumber upper(std::isinf(above) ? 0x1p1023 : above);
    if (std::isinf(above)) upper.add(0x1p1023);
    const BigNumber down = minus(BigNumber(below)), up = upper.minus(*this);
    if (down == up) return low % 2 == 0 ? below : above;
    return down < up ? below : above;
  }

 private:
  std::vector<std::uint32_t> digits_;
};

double reference_sum(const std::vector<double>& values) {
  BigNumber positive, negative;
  for (double value : values) (std::signbit(value) ? negative : positive).add(value);
  return positive >= negative ? positive.minus(negative).rounded() : -negative.minus(positive).rounded();
}

double exact_sum(const std::vector<double>& values) {
  ExactSum sum;
  for (double value : values) sum.add(value);
  return sum.value();
}

/// Random bits with exponents up to `largest`, of both signs unless `positive`.
std::vector<double> wild_values(std::size_t count, int largest, bool positive, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::vector<double> values;
  while (values.size() < count) {
    const double value = std::bit_cast<double>(generator());
    if (!std::isfinite(value) || std::ilogb(value) > largest) continue;
    values.push_back(positive ? std::fabs(value) : value);
  }
  return values;
}

TEST(ExactSum, AMillionWildValuesInAnyOrder) {
  for (bool positive : {true, false}) {
    auto values = wild_values(1'000'000, 980, positive, 12);
    const double expected = reference_sum(values);
    std::mt19937_64 generator(13);
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(exact_sum(values), expected);
      std::shuffle(values.begin(), values.end(), generator);
    }
    std::sort(values.begin(), values.end());
    EXPECT_EQ(exact_sum(values), expected);
  }
}

TEST(ExactSum, GroupsAddUpToTheSame) {
  const auto values = wild_values(100'000, 980, false, 14);
  std::vector<ExactSum> groups(7);
  for (std::size_t i = 0; i < values.size(); ++i) groups[i * i % 7].add(values[i]);
  ExactSum total;
  for (const ExactSum& group : groups) total.add(group);
  EXPECT_EQ(total.value(), reference_sum(values));
}

// Few values, so that ties, cancellation and denormal results come up; each compared with the search.
TEST(ExactSum, RoundsOnceToNearestEven) {
  std::mt19937_64 generator(15);
  for (int round = 0; round < 3000; ++round) {
    std::vector<double> values;
    const int centre = static_cast<int>(generator() % 2000) - 1020;
    for (int i = 0; i < 6; ++i) {
      const double sign = generator() % 2 == 0 ? 1 : -1;
      values.push_back(
          sign * std::ldexp(static_cast<double>(1 + generator() % 7), centre - static_cast<int>(generator() % 58)));
    }
    ASSERT_EQ(exact_sum(values), reference_sum(values)) << "round " << round;
  }
}

TEST(ExactSum, TiesAndSingleValues) {
  EXPECT_EQ(exact_sum({1, 0x1p-53}), 1);
  EXPECT_EQ(exact_sum({1, 0x1p-53, kTiny}), 1 + 0x1p-52);
  EXPECT_EQ(exact_sum({1 + 0x1p-52, 0x1p-53}), 1 + 0x1p-51);
  EXPECT_EQ(exact_sum({-1, -0x1p-53, -kTiny}), -1 - 0x1p-52);
  EXPECT_EQ(exact_sum({1e300, 1, -1e300}), 1);
  for (double value : {0.1, -0.1, kTiny, -kTiny, 3e-310, 0x1p-1022, kLargest, -kLargest, 12345.678}) {
    EXPECT_EQ(exact_sum({value}), value);
  }
}

TEST(ExactSum, ZeroIsPositive) {
  EXPECT_FALSE(std::signbit(exact_sum({})));
  EXPECT_FALSE(std::signbit(exact_sum({-0.0, -0.0})));
  EXPECT_FALSE(std::signbit(exact_sum({5.5, -5.5})));
}

TEST(ExactSum, OverflowsToInfinityOnlyInTheResult) {
  EXPECT_EQ(exact_sum({kLargest, kLargest}), kInfinity);
  EXPECT_EQ(exact_sum({-kLargest, -kLargest}), -kInfinity);
  EXPECT_EQ(exact_sum({kLargest, kLargest, -kLargest}), kLargest);
  EXPECT_EQ(exact_sum({kLargest, 0x1p969}), kLargest);   // below half a unit in the last place
  EXPECT_EQ(exact_sum({kLargest, 0x1p970}), kInfinity);  // half of it: to even, which is 2^1024
  ExactSum sum;
  sum.add(kLargest);
  sum.add(kLargest);
  EXPECT_TRUE(sum.finite());
}

TEST(ExactSum, InfinitiesAndNanSpread) {
  EXPECT_EQ(exact_sum({1, kInfinity}), kInfinity);
  EXPECT_EQ(exact_sum({-kInfinity, kLargest}), -kInfinity);
  EXPECT_TRUE(std::isnan(exact_sum({kInfinity, -kInfinity})));
  EXPECT_TRUE(std::isnan(exact_sum({1, std::nan(""), kInfinity})));
  ExactSum bad, total;
  bad.add(std::nan(""));
  total.add(1);
  EXPECT_TRUE(total.finite());
  total.add(bad);
  EXPECT_FALSE(total.finite());
  EXPECT_TRUE(std::isnan(total.value()));
  total.clear();
  EXPECT_TRUE(total.finite());
  EXPECT_EQ(total.value(), 0);
}

TEST(ExactSum, CanBeSentAsBytes) {
  EXPECT_TRUE(std::is_trivially_copyable_v<ExactSum>);
}

}  // namespace
}  // namespace spillway::kernels
