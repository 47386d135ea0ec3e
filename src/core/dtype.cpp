// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/dtype.h"

#include <array>
#include <utility>

namespace spillway {
namespace {

struct Name {
  DType type;
  std::string_view name;
  std::string_view alias;
};

constexpr std::array<Name, 13> kNames{{{DType::f32, "fp32", "float32"},
                                       {DType::bf16, "bf16", "bfloat16"},
                                       {DType::f16, "fp16", "float16"},
                                       {DType::f64, "fp64", "float64"},
                                       {DType::i64, "int64", "i64"},
                                       {DType::i32, "int32", "i32"},
                                       {DType::i16, "int16", "i16"},
                                       {DType::i8, "int8", "i8"},
                                       {DType::u64, "uint64", "u64"},
                                       {DType::u32, "uint32", "u32"},
                                       {DType::u16, "uint16", "u16"},
                                       {DType::u8, "uint8", "u8"},
                                       {DType::boolean, "bool", "boolean"}}};

}  // namespace

std::string_view to_string(DType type) {
  for (const Name& entry : kNames) {
    if (entry.type == type) return entry.name;
  }
  return "unknown";
}

std::optional<DType> parse_dtype(std::string_view text) {
  for (const Name& entry : kNames) {
    if (entry.name == text || entry.alias == text) return entry.type;
  }
  return std::nullopt;
}

}  // namespace spillway
