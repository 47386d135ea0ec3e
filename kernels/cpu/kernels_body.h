// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loops of one instruction set: included by one source each, which its compile flags turn into vector code. As in
// arithmetic.h all is internal to that source, and nothing here calls an inline function of the standard library.

#include "kernels/arithmetic.h"
#include "kernels/cpu_kernels.h"

namespace spillway::kernels {
namespace {

/// The "element type" of an output that is not wanted.
struct NoOutput {
  using Stored = char;
};

// ---- one dispatch for every kernel
// -----------------------------------------------------------------------------------

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

template <class Function>
void with_optional_type(Element type, const Function& function) {
  return type == Element::none ? function(NoOutput{}) : with_type(type, function);
}

// ---- optimizers
// ------------------------------------------------------------------------------------------------------

template <class Output>
SPILLWAY_HD void store_copy(typename Output::Stored* copy, std::int64_t i, float value) {
  copy[i] = Output::narrow(value);
}
template <>
SPILLWAY_HD void store_copy<NoOutput>(char*, std::int64_t, float) {}

/// The frame of every element-wise optimizer: one pass that reads and widens the gradient, updates, and rounds the
/// copy.
template <class Optimizer, class Gradient, class Output, class Scalars, class... State>
void update_elements(const Scalars& scalars, std::int64_t count, const typename Gradient::Stored* __restrict g,
                     typename Output::Stored* __restrict copy, float* __restrict p, State* __restrict... states) {
  const Scalars local = scalars;  // stores through float pointers cannot change it, so it stays in registers
  for (std::int64_t i = 0; i < count; ++i) {
    float value = p[i];
    Optimizer::update(local, value, local.grad_factor * Gradient::widen(g[i]), states[i]...);
    p[i] = value;
    store_copy<Output>(copy, i, value);
  }
}

template <class Optimizer, class Scalars, class... State>
void update(const Scalars& scalars, const void* g, Element g_type, void* copy, Element copy_type, std::int64_t count,
            float* p, State*... states) {
  with_type(g_type, [&](auto gradient) {
    with_optional_type(copy_type, [&](auto output) {
      using Gradient = decltype(gradient);
      using Output = decltype(output);
      update_elements<Optimizer, Gradient, Output>(scalars, count, static_cast<const typename Gradient::Stored*>(g),
                                                   static_cast<typename Output::Stored*>(copy), p, states...);
    });
  });
}

void adam(const AdamScalars& scalars, float* p, float* m, float* v, const void* g, Element g_type, void* copy,
          Element copy_type, std::int64_t count) {
  update<Adam>(scalars, g, g_type, copy, copy_type, count, p, m, v);
}

// ---- conversions
// -----------------------------------------------------------------------------------------------------

template <class Type>
void widen_elements(float* __restrict target, const typename Type::Stored* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Type::widen(source[i]);
}

void widen(float* target, const void* source, Element type, std::int64_t count) {
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    widen_elements<Type>(target, static_cast<const typename Type::Stored*>(source), count);
  });
}

template <class Type>
void accumulate_elements(float* __restrict target, const typename Type::Stored* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = target[i] + Type::widen(source[i]);
}

void accumulate(float* target, const void* source, Element type, std::int64_t count) {
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    accumulate_elements<Type>(target, static_cast<const typename Type::Stored*>(source), count);
  });
}

template <class Type>
void narrow_elements(typename Type::Stored* __restrict target, const float* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Type::narrow(source[i]);
}

void narrow(void* target, Element type, const float* source, std::int64_t count) {
  with_type(type, [&](auto tag) {
    using Type = decltype(tag);
    narrow_elements<Type>(static_cast<typename Type::Stored*>(target), source, count);
  });
}

// ---- norm
// ------------------------------------------------------------------------------------------------------------

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
  return {name, adam, widen, accumulate, narrow, grain_square_sums};
}

}  // namespace
}  // namespace spillway::kernels
