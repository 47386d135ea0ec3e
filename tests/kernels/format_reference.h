// SPDX-License-Identifier: Apache-2.0
#pragma once

// The small forms of masters and states, stated a second time from docs/numerics.md.

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu_kernels.h"

namespace spillway::test {

std::uint16_t split_working_reference(float value);
std::uint16_t split_low_reference(float value);
float join_reference(std::uint16_t working, std::uint16_t low);

std::uint32_t random_word_reference(std::uint64_t seed, std::int64_t step, std::uint64_t index);

/// The value of an 8-bit code relative to its block's scale (squares: the square root of it).
double code_reference(std::uint8_t code, kernels::StateKind kind);

/// A state in one of its forms, with the bytes that the kernels must produce.
struct PackedState {
  kernels::StateFormat format = kernels::StateFormat::f32;
  kernels::StateKind kind = kernels::StateKind::any_sign;
  std::vector<float> wide;            // f32
  std::vector<std::uint16_t> halves;  // bf16
  std::vector<std::uint8_t> codes;    // block8
  std::vector<float> scales;

  PackedState(kernels::StateFormat form, kernels::StateKind of, std::size_t count);
  kernels::StateArray array(std::size_t first);
  /// Sets all elements; element 0 has index `first` among all parameters.
  void pack(std::span<const float> values, std::uint64_t seed, std::int64_t step, std::uint64_t first);
  std::vector<float> unpack() const;
};

}  // namespace spillway::test
