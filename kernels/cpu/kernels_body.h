// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loops of one instruction set: included by one source each, which its compile flags turn into vector code. As in
// arithmetic.h all is internal to that source, and nothing here calls an inline function of the standard library.

#include "kernels/arithmetic.h"
#include "kernels/cpu/state_tiles.h"
#include "kernels/cpu_kernels.h"

namespace spillway::kernels {
namespace {

// ---- one dispatch for every kernel --------------------------------------------------------------

template <class Function>
void with_type(Element type, const Function& function) {
  switch (type) {
    case Element::f32:
      return function(F32{});
    case Element::bf16:
      return function(Bf16{});
    case Element::f16:
      return function(F16{});
    case Element::none:
      return;
  }
}

// ---- conversions --------------------------------------------------------------------------------

template <class Type>
void widen_elements(float* __restrict target, const typename Type::Stored* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Type::widen(source[i]);
}

template <class Type>
void accumulate_elements(float* __restrict target, const typename Type::Stored* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = target[i] + Type::widen(source[i]);
}

template <class Type>
void narrow_elements(typename Type::Stored* __restrict target, const float* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Type::narrow(source[i]);
}

#if defined(__F16C__)

// The processor's own fp16 conversions, to the same bits; compilers do not find them in F16's arithmetic, which takes
// five times as long. Written with builtins since the functions around them are inline functions of a header.

using Floats = float __attribute__((vector_size(32)));
using Halves = short __attribute__((vector_size(16)));
constexpr std::int64_t kVector = 8;

template <class Vector>
SPILLWAY_HD Vector load(const void* source) {
  Vector vector;
  memcpy(&vector, source, sizeof(vector));
  return vector;
}

template <>
void widen_elements<F16>(float* __restrict target, const std::uint16_t* __restrict source, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kVector <= count; i += kVector) {
    const Floats wide = __builtin_ia32_vcvtph2ps256(load<Halves>(source + i));
    memcpy(target + i, &wide, sizeof(wide));
  }
  for (; i < count; ++i) target[i] = F16::widen(source[i]);
}

template <>
void accumulate_elements<F16>(float* __restrict target, const std::uint16_t* __restrict source, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kVector <= count; i += kVector) {
    const Floats sum = load<Floats>(target + i) + __builtin_ia32_vcvtph2ps256(load<Halves>(source + i));
    memcpy(target + i, &sum, sizeof(sum));
  }
  for (; i < count; ++i) target[i] = target[i] + F16::widen(source[i]);
}

template <>
void narrow_elements<F16>(std::uint16_t* __restrict target, const float* __restrict source, std::int64_t count) {
  constexpr int kNearestEven = 0;
  std::int64_t i = 0;
  for (; i + kVector <= count; i += kVector) {
    const Halves half = __builtin_ia32_vcvtps2ph256(load<Floats>(source + i), kNearestEven);
    memcpy(target + i, &half, sizeof(half));
  }
  for (; i < count; ++i) target[i] = F16::narrow(source[i]);
}

#endif

void widen(float* target, const void* source, Element type, std::int64_t count) {
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    widen_elements<Type>(target, static_cast<const typename Type::Stored*>(source), count);
  });
}

void accumulate(float* target, const void* source, Element type, std::int64_t count) {
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    accumulate_elements<Type>(target, static_cast<const typename Type::Stored*>(source), count);
  });
}

void narrow(void* target, Element type, const float* source, std::int64_t count) {
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    narrow_elements<Type>(static_cast<typename Type::Stored*>(target), source, count);
  });
}

// ---- optimizers ---------------------------------------------------------------------------------

constexpr std::int64_t element_bytes(Element type) {
  return type == Element::f32 ? 4 : 2;
}

template <class Optimizer, class Scalars, class... State>
void update_tile(const Scalars& scalars, std::int64_t count, const float* __restrict g, float* __restrict p,
                 State* __restrict... states) {
  const Scalars local = scalars;  // stores through float pointers cannot change it, so it stays in registers
  for (std::int64_t i = 0; i < count; ++i) {
    float value = p[i];
    Optimizer::update(local, value, local.grad_factor * g[i], states[i]...);
    p[i] = value;
  }
}

template <class Optimizer, class Scalars>
void update_tile_of(const Scalars& scalars, std::int64_t count, const float* g, float* p, float* const* states) {
  if constexpr (Optimizer::kStates == 0) update_tile<Optimizer>(scalars, count, g, p);
  if constexpr (Optimizer::kStates == 1) update_tile<Optimizer>(scalars, count, g, p, states[0]);
  if constexpr (Optimizer::kStates == 2) update_tile<Optimizer>(scalars, count, g, p, states[0], states[1]);
}

/// A tile of everything, in fp32.
struct Buffers {
  alignas(64) float g[kTile];
  alignas(64) float p[kTile];
  alignas(64) float states[2][kTile];
  alignas(64) std::uint32_t random[kTile];
};

template <class Optimizer>
bool any_random(const UpdateArrays& arrays) {
  bool any = false;
  for (int k = 0; k < Optimizer::kStates; ++k) any = any || arrays.states[k].format == StateFormat::bf16;
  return any;
}

/// The frame of every element-wise optimizer: memory is passed over once, tile by tile; inside a tile what is not fp32
/// is widened, the update runs in fp32, and results are rounded into their forms. Measured against one fused loop for
/// each pair of types: as fast at memory speed, faster in cache (fp16 twice), and one loop an optimizer instead of
/// twelve.
template <class Optimizer, class Scalars>
void update(const Scalars& scalars, const UpdateArrays& arrays) {
  Buffers buffers;
  const bool random = any_random<Optimizer>(arrays);
  for (std::int64_t start = 0; start < arrays.count; start += kTile) {
    const std::int64_t size = arrays.count - start < kTile ? arrays.count - start : kTile;
    const void* g_tile = static_cast<const char*>(arrays.g) + start * element_bytes(arrays.g_type);
    const bool g_wide = arrays.g_type == Element::f32;
    if (!g_wide) widen(buffers.g, g_tile, arrays.g_type, size);
    float* p = load_master(arrays.p, start, size, buffers.p);
    float* states[2] = {nullptr, nullptr};
    for (int k = 0; k < Optimizer::kStates; ++k) {
      states[k] = load_state(arrays.states[k], Optimizer::kKinds[k], start, size, buffers.states[k]);
    }
    update_tile_of<Optimizer>(scalars, size, g_wide ? static_cast<const float*>(g_tile) : buffers.g, p, states);
    if (random) fill_random(buffers.random, arrays.key, arrays.first + start);
    for (int k = 0; k < Optimizer::kStates; ++k) {
      store_state(arrays.states[k], Optimizer::kKinds[k], start, size, states[k], buffers.random);
    }
    store_master(arrays.p, start, size, p);
    if (arrays.copy_type == Element::none) continue;
    narrow(static_cast<char*>(arrays.copy) + start * element_bytes(arrays.copy_type), arrays.copy_type, p, size);
  }
}

void adam_packed(const AdamScalars& scalars, const UpdateArrays& arrays) {
  update<Adam>(scalars, arrays);
}

void sgd_packed(const SgdScalars& scalars, const UpdateArrays& arrays) {
  scalars.mu == 0 ? update<Sgd>(scalars, arrays) : update<SgdMomentum>(scalars, arrays);
}

void adagrad_packed(const AdagradScalars& scalars, const UpdateArrays& arrays) {
  update<Adagrad>(scalars, arrays);
}

void lion_packed(const LionScalars& scalars, const UpdateArrays& arrays) {
  update<Lion>(scalars, arrays);
}

/// Arrays that are fp32 throughout.
UpdateArrays plain(float* p, float* s0, float* s1, const void* g, Element g_type, void* copy, Element copy_type,
                   std::int64_t count) {
  return {{p, nullptr, nullptr},
          {{StateFormat::f32, s0, nullptr}, {StateFormat::f32, s1, nullptr}},
          g,
          g_type,
          copy,
          copy_type,
          count,
          0,
          {}};
}

void adam(const AdamScalars& scalars, float* p, float* m, float* v, const void* g, Element g_type, void* copy,
          Element copy_type, std::int64_t count) {
  adam_packed(scalars, plain(p, m, v, g, g_type, copy, copy_type, count));
}

void sgd(const SgdScalars& scalars, float* p, float* b, const void* g, Element g_type, void* copy, Element copy_type,
         std::int64_t count) {
  sgd_packed(scalars, plain(p, b, nullptr, g, g_type, copy, copy_type, count));
}

void adagrad(const AdagradScalars& scalars, float* p, float* h, const void* g, Element g_type, void* copy,
             Element copy_type, std::int64_t count) {
  adagrad_packed(scalars, plain(p, h, nullptr, g, g_type, copy, copy_type, count));
}

void lion(const LionScalars& scalars, float* p, float* m, const void* g, Element g_type, void* copy, Element copy_type,
          std::int64_t count) {
  lion_packed(scalars, plain(p, m, nullptr, g, g_type, copy, copy_type, count));
}

// ---- norm ---------------------------------------------------------------------------------------

constexpr int kLanes = 32;  // partial sums of a grain: lane j adds elements j, j + 32, j + 64, ... in that order

double grain_square_sum(const float* values, std::int64_t count) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double value = values[i + j];
      lanes[j] = lanes[j] + value * value;
    }
  }
  for (int j = 0; i < count; ++i, ++j) lanes[j] = lanes[j] + double{values[i]} * double{values[i]};
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] = lanes[j] + lanes[j + width];
  }
  return lanes[0];
}

void grain_square_sums(double* sums, const float* values, std::int64_t count) {
  for (std::int64_t start = 0; start < count; start += kGrain) {
    const std::int64_t left = count - start;
    *sums++ = grain_square_sum(values + start, left < kGrain ? left : kGrain);
  }
}

constexpr CpuKernels make_kernels(const char* name) {
  return {
      name,       adam,         sgd,        adagrad,   lion,  adam_packed, sgd_packed, adagrad_packed,   lion_packed,
      pack_state, unpack_state, split_tile, join_tile, widen, accumulate,  narrow,     grain_square_sums};
}

}  // namespace
}  // namespace spillway::kernels
