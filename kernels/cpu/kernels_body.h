// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loops of one instruction set: included by one source each, which its compile flags turn into vector code. As in
// arithmetic.h all is internal to that source, and nothing here calls an inline function of the standard library.

#include "kernels/arithmetic.h"
#include "kernels/cpu/logged_update.h"
#include "kernels/cpu/state_tiles.h"
#include "kernels/cpu_kernels.h"
#if defined(__AVX2__)
#include "kernels/cpu/vector_update.h"
#endif

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

#if !defined(__AVX2__)

// Where there are no strips, they take care of nothing.
std::int64_t widen_strips(float*, const void*, Element, std::int64_t) {
  return 0;
}
std::int64_t accumulate_strips(float*, const void*, Element, std::int64_t) {
  return 0;
}
std::int64_t narrow_strips(void*, Element, const float*, std::int64_t) {
  return 0;
}

#endif

void widen(float* target, const void* source, Element type, std::int64_t count) {
  const std::int64_t done = widen_strips(target, source, type, count);
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    widen_elements<Type>(target + done, static_cast<const typename Type::Stored*>(source) + done, count - done);
  });
}

void accumulate(float* target, const void* source, Element type, std::int64_t count) {
  const std::int64_t done = accumulate_strips(target, source, type, count);
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    accumulate_elements<Type>(target + done, static_cast<const typename Type::Stored*>(source) + done, count - done);
  });
}

void narrow(void* target, Element type, const float* source, std::int64_t count) {
  const std::int64_t done = narrow_strips(target, type, source, count);
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    narrow_elements<Type>(static_cast<typename Type::Stored*>(target) + done, source + done, count - done);
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

/// The frame of every element-wise optimizer: memory is passed over once. Sets with strips (vector_update.h) do whole
/// tiles in registers. The rest, and everything on other sets: tile by tile, what is not fp32 is widened, the update
/// runs in fp32, and results are rounded into their forms; plain loops, one an optimizer, which compilers make vectors
/// of.
template <class Optimizer, class Scalars>
void update(const Scalars& scalars, const UpdateArrays& arrays) {
  Buffers buffers;
  const bool random = any_random<Optimizer>(arrays);
  std::int64_t start = 0;
#if defined(__AVX2__)
  start = update_tiles<Optimizer>(scalars, arrays);
#endif
  for (; start < arrays.count; start += kTile) {
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

void adam_logged(const AdamScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log) {
  update_logged(arrays, log, 2, [&](const UpdateArrays& part) { update<Adam>(scalars, part); });
}

void sgd_logged(const SgdScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log) {
  // The first step's buffer holds nothing yet, but its memory is there.
  update_logged(arrays, log, scalars.mu == 0 ? 0 : 1, [&](const UpdateArrays& part) { sgd_packed(scalars, part); });
}

void adagrad_logged(const AdagradScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log) {
  update_logged(arrays, log, 1, [&](const UpdateArrays& part) { update<Adagrad>(scalars, part); });
}

void lion_logged(const LionScalars& scalars, const UpdateArrays& arrays, const UpdateLog& log) {
  update_logged(arrays, log, 1, [&](const UpdateArrays& part) { update<Lion>(scalars, part); });
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

constexpr int kPartials = 32;  // partial sums of a grain: the j-th adds elements j, j + 32, j + 64, ... in that order

double grain_square_sum(const float* values, std::int64_t count) {
  double partials[kPartials] = {};
  std::int64_t i = 0;
  for (; i + kPartials <= count; i += kPartials) {
    for (int j = 0; j < kPartials; ++j) {
      const double value = values[i + j];
      partials[j] = partials[j] + value * value;
    }
  }
  for (int j = 0; i < count; ++i, ++j) partials[j] = partials[j] + double{values[i]} * double{values[i]};
  for (int width = kPartials / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) partials[j] = partials[j] + partials[j + width];
  }
  return partials[0];
}

void grain_square_sums(double* sums, const float* values, std::int64_t count) {
  for (std::int64_t start = 0; start < count; start += kGrain) {
    const std::int64_t left = count - start;
    *sums++ = grain_square_sum(values + start, left < kGrain ? left : kGrain);
  }
}

constexpr CpuKernels make_kernels(const char* name) {
  return {name,           adam,        sgd,         adagrad,    lion,           adam_packed, sgd_packed,
          adagrad_packed, lion_packed, adam_logged, sgd_logged, adagrad_logged, lion_logged, pack_state,
          unpack_state,   split_tile,  join_tile,   widen,      accumulate,     narrow,      grain_square_sums};
}

}  // namespace
}  // namespace spillway::kernels
