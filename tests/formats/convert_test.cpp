// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/format_support.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

using test::holds;
using test::message_of;

template <typename To, typename From>
To convert_one(DType from, DType to, From value) {
  // One byte off on both sides: files do not align.
  std::array<std::byte, 9> in{};
  std::array<std::byte, 9> out{};
  std::memcpy(in.data() + 1, &value, sizeof(From));
  convert_elements(from, std::span(in).subspan(1, sizeof(From)), to, std::span(out).subspan(1, sizeof(To)), 1);
  To result;
  std::memcpy(&result, out.data() + 1, sizeof(To));
  return result;
}

std::uint16_t narrow(DType to, float value) {
  return convert_one<std::uint16_t>(DType::f32, to, value);
}
float widen(DType from, std::uint16_t bits) {
  return convert_one<float>(from, DType::f32, bits);
}

TEST(ConvertElements, EverySixteenBitValueComesBackFromFloat) {
  for (const DType type : {DType::bf16, DType::f16}) {
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      const float wide = widen(type, half);
      if (std::isnan(wide)) {
        EXPECT_TRUE(std::isnan(widen(type, narrow(type, wide))));
      } else {
        ASSERT_EQ(narrow(type, wide), half) << to_string(type) << " " << bits;
      }
    }
  }
}

TEST(ConvertElements, KnownValues) {
  EXPECT_EQ(narrow(DType::bf16, 1.0f), 0x3f80);
  EXPECT_EQ(narrow(DType::f16, 1.0f), 0x3c00);
  EXPECT_EQ(narrow(DType::f16, -2.0f), 0xc000);
  EXPECT_EQ(widen(DType::f16, 0x0001), 0x1p-24f);
  EXPECT_EQ(widen(DType::f16, 0x7bff), 65504.0f);
  EXPECT_EQ(widen(DType::bf16, 0x0001), 0x1p-133f);
}

TEST(ConvertElements, TiesGoToEven) {
  EXPECT_EQ(narrow(DType::bf16, std::bit_cast<float>(0x3f808000u)), 0x3f80);
  EXPECT_EQ(narrow(DType::bf16, std::bit_cast<float>(0x3f818000u)), 0x3f82);
  EXPECT_EQ(narrow(DType::bf16, std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(narrow(DType::f16, 2049.0f), narrow(DType::f16, 2048.0f));
  EXPECT_EQ(narrow(DType::f16, 2051.0f), narrow(DType::f16, 2052.0f));
  EXPECT_EQ(narrow(DType::f16, 0x1p-25f), 0);              // half of the smallest: to zero
  EXPECT_EQ(narrow(DType::f16, 0x1.000002p-25f), 0x0001);  // just above half of it
}

TEST(ConvertElements, TheEdgesOfTheRange) {
  EXPECT_EQ(narrow(DType::f16, 65519.996f), 0x7bff);
  EXPECT_EQ(narrow(DType::f16, 65520.0f), 0x7c00);
  EXPECT_EQ(narrow(DType::f16, -1e30f), 0xfc00);
  EXPECT_EQ(narrow(DType::f16, std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_EQ(narrow(DType::bf16, std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(narrow(DType::bf16, -0.0f), 0x8000);
  // A NaN whose payload lies in the low bits alone must not become infinity.
  EXPECT_TRUE(std::isnan(widen(DType::bf16, narrow(DType::bf16, std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(widen(DType::f16, narrow(DType::f16, std::bit_cast<float>(0xff800001u)))));
}

TEST(ConvertElements, BetweenTheSixteenBitTypesRoundsOnce) {
  EXPECT_EQ(convert_one<std::uint16_t>(DType::bf16, DType::f16, std::uint16_t{0x3f80}), 0x3c00);
  EXPECT_EQ(convert_one<std::uint16_t>(DType::bf16, DType::f16, std::uint16_t{0x7f7f}), 0x7c00);
  EXPECT_EQ(convert_one<std::uint16_t>(DType::f16, DType::bf16, std::uint16_t{0x3c00}), 0x3f80);
  EXPECT_EQ(convert_one<std::uint16_t>(DType::f16, DType::bf16, std::uint16_t{0x3c04}), 0x3f80);  // a tie, to even
}

TEST(ConvertElements, EqualTypesAreCopiedBitForBit) {
  const std::uint32_t signalling = 0x7f800001u;
  EXPECT_EQ(convert_one<std::uint32_t>(DType::f32, DType::f32, signalling), signalling);
}

TEST(ConvertElements, OtherTypesAndWrongSizesAreRefused) {
  std::array<std::byte, 8> a{};
  std::array<std::byte, 8> b{};
  EXPECT_TRUE(
      holds(message_of<InvalidArgument>([&] { convert_elements(DType::i32, a, DType::f32, b, 2); }), {"int32"}));
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { convert_elements(DType::f32, a, DType::f64, b, 2); }), {"fp64"}));
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { convert_elements(DType::f32, a, DType::bf16, b, 2); }),
                    {"target", "8 bytes", "2 elements"}));
  EXPECT_THROW(convert_elements(DType::f32, a, DType::f32, b, 3), InvalidArgument);
  EXPECT_THROW(convert_elements(DType::f32, a, DType::f32, b, -2), InvalidArgument);
  EXPECT_THROW(convert_elements(DType::f32, a, DType::f32, b, std::int64_t{1} << 62), InvalidArgument);
  convert_elements(DType::f32, {}, DType::bf16, {}, 0);
}

}  // namespace
}  // namespace spillway
