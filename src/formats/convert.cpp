// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/arithmetic.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

template <typename From, typename To>
void convert_all(std::span<const std::byte> source, std::span<std::byte> target, std::int64_t count) {
  using In = typename From::Stored;
  using Out = typename To::Stored;
  // Files do not align tensors to their elements, so elements are copied in and out.
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    In in;
    std::memcpy(&in, source.data() + i * sizeof(In), sizeof(In));
    const Out out = To::narrow(From::widen(in));
    std::memcpy(target.data() + i * sizeof(Out), &out, sizeof(Out));
  }
}

void check_side(const char* side, DType type, std::size_t bytes, std::int64_t count) {
  require(type == DType::f32 || type == DType::bf16 || type == DType::f16,
          fmt::format("convert_elements: the {} is {}; fp32, bf16 and fp16 are converted", side, to_string(type)));
  const bool fits = count >= 0 && count <= std::numeric_limits<std::int64_t>::max() / size_of(type);
  require(
      fits && bytes == static_cast<std::size_t>(count * size_of(type)),
      fmt::format("convert_elements: the {} has {} bytes for {} elements of {}", side, bytes, count, to_string(type)));
}

}  // namespace

void convert_elements(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target,
                      std::int64_t count) {
  using kernels::Bf16;
  using kernels::F16;
  using kernels::F32;
  check_side("source", from, source.size(), count);
  check_side("target", to, target.size(), count);
  if (from == to) {
    std::copy(source.begin(), source.end(), target.begin());
  } else if (from == DType::f32) {
    to == DType::bf16 ? convert_all<F32, Bf16>(source, target, count) : convert_all<F32, F16>(source, target, count);
  } else if (to == DType::f32) {
    from == DType::bf16 ? convert_all<Bf16, F32>(source, target, count) : convert_all<F16, F32>(source, target, count);
  } else if (from == DType::bf16) {
    convert_all<Bf16, F16>(source, target, count);
  } else {
    convert_all<F16, Bf16>(source, target, count);
  }
}

}  // namespace spillway
