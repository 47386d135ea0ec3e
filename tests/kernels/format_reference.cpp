// SPDX-License-Identifier: Apache-2.0
#include "kernels/format_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/reference.h"

namespace spillway::test {
namespace {

using kernels::Element;
using kernels::kBlock;
using kernels::StateFormat;
using kernels::StateKind;

std::uint64_t split_mix(std::uint64_t z) {
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9;
  z ^= z >> 27;
  z *= 0x94d049bb133111eb;
  z ^= z >> 31;
  return z;
}

std::uint32_t murmur_mix(std::uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6b;
  h ^= h >> 13;
  h *= 0xc2b2ae35;
  h ^= h >> 16;
  return h;
}

std::uint16_t round_at_random(float value, std::uint32_t random) {
  if (std::isnan(value)) return narrow_reference(value, Element::bf16);
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool away = (bits & 0xffff) + random > 0xffff;  // away from zero with probability (low bits) / 2^16
  return static_cast<std::uint16_t>((bits >> 16) + (away ? 1 : 0));
}

int levels_of(StateKind kind) {
  return kind == StateKind::square ? 8 : 7;
}

// Every operation here is one fp32 operation.
int encode_reference(float relative, int levels) {
  if (!(relative > 0)) return 0;
  int level = 0;
  while (level + 1 < levels && relative < std::ldexp(1.0f, -3 * (level + 1))) ++level;
  const int top = levels - 1;
  const float rise = std::ldexp(8.0f / 7.0f, top + 2 * level);
  const float start = std::ldexp(6.0f / 7.0f, top - level) - 1.0f;
  const float product = relative * rise;
  return static_cast<int>(std::nearbyint(product + start));
}

float relative_to(float scale, float magnitude) {
  const float lift = scale < 0x1p-100f ? 0x1p64f : 1.0f;
  const float lifted = scale * lift;
  const float inverse = 1.0f / lifted;
  const float raised = magnitude * lift;
  return raised * inverse;
}

std::uint8_t encode_in_block(float value, float scale, StateKind kind) {
  if (kind == StateKind::any_sign) {
    const int code = encode_reference(relative_to(scale, std::fabs(value)), 7);
    return static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
  }
  const int code = encode_reference(relative_to(scale, std::sqrt(value)), 8);
  return static_cast<std::uint8_t>(value > 0 ? std::max(code, 1) : code);
}

float scale_of(std::span<const float> block, StateKind kind) {
  float largest = 0;
  for (float value : block) {
    if (std::isnan(value)) return value;
    largest = std::max(largest, std::fabs(value));
  }
  return kind == StateKind::square ? std::sqrt(largest) : largest;
}

}  // namespace

std::uint16_t split_working_reference(float value) {
  if (std::isnan(value) || std::isinf(value)) return narrow_reference(value, Element::bf16);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return std::signbit(value) ? 0x8000 : 0;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int unit = std::max(exponent - 8, -133);
  // std::round takes ties away from zero; the result has no more than 8 bits, so narrowing it is exact.
  const double rounded = std::ldexp(std::round(std::ldexp(magnitude, -unit)), unit);
  const float wide = rounded >= 0x1p128 ? HUGE_VALF : static_cast<float>(rounded);
  return narrow_reference(std::copysign(wide, value), Element::bf16);
}

std::uint16_t split_low_reference(float value) {
  return std::isnan(value) ? 0 : static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) % 65536);
}

float join_reference(std::uint16_t working, std::uint16_t low) {
  // The low half counts from -32768 to 32767 in units of fp32's last place.
  const std::int64_t offset = low < 32768 ? low : std::int64_t{low} - 65536;
  return std::bit_cast<float>(static_cast<std::uint32_t>(std::int64_t{working} * 65536 + offset));
}

std::uint32_t random_word_reference(std::uint64_t seed, std::int64_t step, std::uint64_t index) {
  const std::uint64_t golden = 0x9e3779b97f4a7c15;
  const std::uint64_t of_step = split_mix(split_mix(seed + golden) + static_cast<std::uint64_t>(step) * golden);
  const std::uint64_t of_block = split_mix(of_step + index / 256 * golden);
  const auto before = static_cast<std::uint32_t>(of_block), after = static_cast<std::uint32_t>(of_block >> 32);
  return murmur_mix(static_cast<std::uint32_t>(index % 256) ^ before) ^ after;
}

double code_reference(std::uint8_t code, StateKind kind) {
  const int levels = levels_of(kind);
  const int magnitude = kind == StateKind::square ? code : code & 0x7f;
  const double sign = kind == StateKind::any_sign && code >= 0x80 ? -1 : 1;
  if (magnitude == 0) return sign * 0.0;
  const int bottom = static_cast<int>(std::log2(magnitude));  // which level from the bottom
  const double steps = std::ldexp(1.0, bottom);
  const double part = (magnitude - steps + 1) / steps;
  return sign * std::ldexp(0.125 + 0.875 * part, -3 * (levels - 1 - bottom));
}

PackedState::PackedState(StateFormat form, StateKind of, std::size_t count) : format(form), kind(of) {
  if (format == StateFormat::f32) wide.resize(count);
  if (format == StateFormat::bf16) halves.resize(count);
  if (format == StateFormat::block8) codes.resize(count), scales.resize((count + kBlock - 1) / kBlock);
}

kernels::StateArray PackedState::array(std::size_t first) {
  if (format == StateFormat::f32) return {format, wide.data() + first, nullptr};
  if (format == StateFormat::bf16) return {format, halves.data() + first, nullptr};
  return {format, codes.data() + first, scales.data() + first / kBlock};
}

void PackedState::pack(std::span<const float> values, std::uint64_t seed, std::int64_t step, std::uint64_t first) {
  if (format == StateFormat::f32) wide.assign(values.begin(), values.end());
  for (std::size_t i = 0; i < values.size() && format == StateFormat::bf16; ++i) {
    const std::uint32_t word = random_word_reference(seed, step, first + i);
    halves[i] = round_at_random(values[i], kind == StateKind::square ? word >> 16 : word & 0xffff);
  }
  for (std::size_t i = 0; i < values.size() && format == StateFormat::block8; ++i) {
    float& scale = scales[i / kBlock];
    if (i % kBlock == 0) scale = scale_of(values.subspan(i, std::min<std::size_t>(kBlock, values.size() - i)), kind);
    codes[i] = encode_in_block(values[i], scale, kind);
  }
}

std::vector<float> PackedState::unpack() const {
  if (format == StateFormat::f32) return wide;
  std::vector<float> values;
  for (std::uint16_t half : halves) values.push_back(widen_reference(half, Element::bf16));
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const float scaled = static_cast<float>(code_reference(codes[i], kind)) * scales[i / kBlock];
    values.push_back(kind == StateKind::square ? scaled * scaled : scaled);
  }
  return values;
}

}  // namespace spillway::test
