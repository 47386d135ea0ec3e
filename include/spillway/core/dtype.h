// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace spillway {

/// Element types of files and of model state.
enum class DType : std::uint8_t { f32, bf16, f16, f64, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

/// Bytes of one element.
constexpr std::int64_t size_of(DType type) {
  switch (type) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
    case DType::u16:
      return 2;
    case DType::i8:
    case DType::u8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

/// "fp32", "bf16", "fp16", ...: the words of configurations and messages.
std::string_view to_string(DType type);

/// The inverse of to_string; also reads "float32", "bfloat16", "float16" and the like. Empty when unknown.
std::optional<DType> parse_dtype(std::string_view text);

}  // namespace spillway
