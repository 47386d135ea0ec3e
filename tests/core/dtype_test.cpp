// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace spillway {
namespace {

const std::vector<std::pair<DType, std::int64_t>> kSizes{
    {DType::f32, 4}, {DType::bf16, 2}, {DType::f16, 2},    {DType::f64, 8}, {DType::i64, 8},
    {DType::i32, 4}, {DType::i16, 2},  {DType::i8, 1},     {DType::u64, 8}, {DType::u32, 4},
    {DType::u16, 2}, {DType::u8, 1},   {DType::boolean, 1}};

TEST(DType, SizesOfElements) {
  for (const auto& [type, size] : kSizes) EXPECT_EQ(size_of(type), size) << to_string(type);
  static_assert(size_of(DType::bf16) == 2);
}

TEST(DType, WordsAreDistinctAndComeBack) {
  std::set<std::string> words;
  for (const auto& [type, size] : kSizes) {
    EXPECT_TRUE(words.insert(std::string(to_string(type))).second);
    EXPECT_EQ(parse_dtype(to_string(type)), type);
  }
}

TEST(DType, TorchsWordsAreReadToo) {
  EXPECT_EQ(parse_dtype("float32"), DType::f32);
  EXPECT_EQ(parse_dtype("bfloat16"), DType::bf16);
  EXPECT_EQ(parse_dtype("float16"), DType::f16);
  EXPECT_EQ(parse_dtype("float64"), DType::f64);
  EXPECT_EQ(parse_dtype("int32"), DType::i32);
  EXPECT_EQ(parse_dtype("bool"), DType::boolean);
}

TEST(DType, OtherWordsAreUnknown) {
  for (const char* text : {"", "unknown", "FP32", "fp", "fp8", "float", "F32", " fp32", "fp32 "}) {
    EXPECT_EQ(parse_dtype(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace spillway
