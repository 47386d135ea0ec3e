// SPDX-License-Identifier: Apache-2.0
#pragma once

// Smaller forms of masters and optimizer states, and the arrays of an update that uses them. Numerics:
// docs/numerics.md. C++17 and the standard library alone.

#include <cstdint>

#include "kernels/scalars.h"

namespace spillway::kernels {

/// Elements that share one scale in the 8-bit form: a quarter of a grain.
constexpr std::int64_t kBlock = 256;

/// What values a state takes, which decides how its small forms code them.
enum class StateKind : std::uint8_t {
  any_sign,  // Adam's and Lion's m, the momentum buffer
  square,    // Adam's v, Adagrad's h: never negative; 8-bit codes hold square roots
};

/// How a state is kept.
enum class StateFormat : std::uint8_t {
  f32,
  bf16,    // rounded up or down at random, by distance
  block8,  // 8-bit codes, one fp32 scale a block
};

/// One optimizer state. Owns: nothing.
struct StateArray {
  StateFormat format = StateFormat::f32;
  void* data = nullptr;     // float, 16 bits or 8 bits an element
  float* scales = nullptr;  // block8: one a block
};

/// The master copy of parameters: fp32, or (where `f32` is null) the bf16 working copy and the 16 bits that complete
/// it. Owns: nothing.
struct MasterArray {
  float* f32 = nullptr;
  std::uint16_t* working = nullptr;
  std::uint16_t* low = nullptr;
};

/// Selects the random bits of one step. With it they depend on an element's index alone.
struct RoundingKey {
  std::uint64_t bits = 0;
};

RoundingKey rounding_key(std::uint64_t seed, std::int64_t step);

/// The arrays of one update; each pointer is that of the first element.
struct UpdateArrays {
  MasterArray p;
  StateArray states[2];  // in the order of the kernel's name for them: m, v
  const void* g = nullptr;
  Element g_type = Element::f32;
  void* copy = nullptr;  // another working copy, where wanted
  Element copy_type = Element::none;
  std::int64_t count = 0;
  std::int64_t first = 0;  // index of the first element among all parameters: a multiple of kBlock
  RoundingKey key;
};

/// Where an update that can be undone writes what it is about to change: masters and states in the formats of the
/// update's own, of as many elements. Written back by copying, they are the masters and states from before. Owns:
/// nothing.
struct UpdateLog {
  MasterArray p;
  StateArray states[2];
};

}  // namespace spillway::kernels
