// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one thread of a CUDA kernel does, as functions that both compilers read: the host's tests call them for every
// thread number in turn, so that all but the launch itself is tested without a GPU.
//
// Element types are told apart while the kernel runs, by a branch that all threads take alike: a kernel for each
// combination would not be faster at the speed of memory, and would take an hour to compile.

#include "kernels/arithmetic.h"
#include "kernels/cuda/launch.h"

namespace spillway::kernels::cuda {
namespace {

/// The threads of a launch go round: a thread's first item, and the distance to its next.
struct Turn {
  std::int64_t first = 0;
  std::int64_t stride = 1;
};

// ---- loads and stores of one element or a quad --------------------------------------------------

template <int kCount, class T>
SPILLWAY_HD void load_raw(T (&target)[kCount], const void* source, std::int64_t at) {
  const T* elements = static_cast<const T*>(source) + at;
  if constexpr (kCount == 1) {
    target[0] = elements[0];
    return;
  }
  const void* address = elements;
  memcpy(target, __builtin_assume_aligned(address, sizeof(target)), sizeof(target));
}

template <int kCount, class T>
SPILLWAY_HD void store_raw(void* target, std::int64_t at, const T (&source)[kCount]) {
  T* elements = static_cast<T*>(target) + at;
  if constexpr (kCount == 1) {
    elements[0] = source[0];
    return;
  }
  void* address = elements;
  memcpy(__builtin_assume_aligned(address, sizeof(source)), source, sizeof(source));
}

template <class Type, int kCount>
SPILLWAY_HD void load_as(float (&target)[kCount], const void* source, std::int64_t at) {
  typename Type::Stored raw[kCount];
  load_raw(raw, source, at);
  for (int j = 0; j < kCount; ++j) target[j] = Type::widen(raw[j]);
}

template <class Type, int kCount>
SPILLWAY_HD void store_as(void* target, std::int64_t at, const float (&source)[kCount]) {
  typename Type::Stored raw[kCount];
  for (int j = 0; j < kCount; ++j) raw[j] = Type::narrow(source[j]);
  store_raw(target, at, raw);
}

template <int kCount>
SPILLWAY_HD void load(float (&target)[kCount], const void* source, Element type, std::int64_t at) {
  if (type == Element::bf16) return load_as<Bf16>(target, source, at);
  if (type == Element::f16) return load_as<F16>(target, source, at);
  load_as<F32>(target, source, at);
}

template <int kCount>
SPILLWAY_HD void store(void* target, Element type, std::int64_t at, const float (&source)[kCount]) {
  if (type == Element::bf16) return store_as<Bf16>(target, at, source);
  if (type == Element::f16) return store_as<F16>(target, at, source);
  if (type == Element::f32) store_as<F32>(target, at, source);
}

/// Calls body(first element, how many as a compile-time constant) for this thread's quads and single elements.
template <class Body>
SPILLWAY_HD void for_shares(const Shares& shares, Turn turn, const Body& body) {
  for (std::int64_t i = turn.first; i < shares.quads; i += turn.stride) body.template run<kQuad>(shares.quad(i));
  for (std::int64_t i = turn.first; i < shares.singles(); i += turn.stride) body.template run<1>(shares.single(i));
}

// ---- kernels ------------------------------------------------------------------------------------

/// The arrays of an update; states that the optimizer lacks are null.
struct UpdateSpan {
  float* p = nullptr;
  float* states[2] = {nullptr, nullptr};
  const void* g = nullptr;
  void* copy = nullptr;
  Element g_type = Element::f32;
  Element copy_type = Element::none;
};

template <class Optimizer, class Scalars>
struct UpdateBody {
  const Scalars& scalars;
  const UpdateSpan& arrays;

  template <int kCount>
  SPILLWAY_HD void run(std::int64_t at) const {
    constexpr int kRoom = Optimizer::kStates == 0 ? 1 : Optimizer::kStates;
    float g[kCount], p[kCount], states[kRoom][kCount];
    load(g, arrays.g, arrays.g_type, at);
    load_raw(p, arrays.p, at);
    for (int k = 0; k < Optimizer::kStates; ++k) load_raw(states[k], arrays.states[k], at);
    for (int j = 0; j < kCount; ++j) {
      const float scaled = scalars.grad_factor * g[j];
      if constexpr (Optimizer::kStates == 0) Optimizer::update(scalars, p[j], scaled);
      if constexpr (Optimizer::kStates == 1) Optimizer::update(scalars, p[j], scaled, states[0][j]);
      if constexpr (Optimizer::kStates == 2) Optimizer::update(scalars, p[j], scaled, states[0][j], states[1][j]);
    }
    for (int k = 0; k < Optimizer::kStates; ++k) store_raw(arrays.states[k], at, states[k]);
    store_raw(arrays.p, at, p);
    store(arrays.copy, arrays.copy_type, at, p);
  }
};

template <class Optimizer, class Scalars>
SPILLWAY_HD void update_thread(const Scalars& scalars, const UpdateSpan& arrays, const Shares& shares, Turn turn) {
  for_shares(shares, turn, UpdateBody<Optimizer, Scalars>{scalars, arrays});
}

struct WidenBody {
  float* target;
  const void* source;
  Element type;

  template <int kCount>
  SPILLWAY_HD void run(std::int64_t at) const {
    float values[kCount];
    load(values, source, type, at);
    store_raw(target, at, values);
  }
};

struct AccumulateBody {
  void* target;
  Element target_type;
  const void* source;
  Element type;

  template <int kCount>
  SPILLWAY_HD void run(std::int64_t at) const {
    float values[kCount], sum[kCount];
    load(values, source, type, at);
    load(sum, target, target_type, at);
    for (int j = 0; j < kCount; ++j) sum[j] = sum[j] + values[j];
    store(target, target_type, at, sum);
  }
};

struct NarrowBody {
  void* target;
  Element type;
  const float* source;

  template <int kCount>
  SPILLWAY_HD void run(std::int64_t at) const {
    float values[kCount];
    load_raw(values, source, at);
    store(target, type, at, values);
  }
};

// ---- norm ---------------------------------------------------------------------------------------
// A warp takes a grain, a thread of it one of the 32 partial sums that the CPU's kernels have.

/// The partial sum of thread `lane` over `count` values, a grain or less, from the element `begin` on.
SPILLWAY_HD double partial_square_sum(const void* values, Element type, std::int64_t begin, std::int64_t count,
                                      std::int64_t lane) {
  double sum = 0;
  for (std::int64_t i = lane; i < count; i += kWarp) {
    float one[1];
    load(one, values, type, begin + i);
    const double value = one[0];
    sum = sum + value * value;
  }
  return sum;
}

SPILLWAY_HD std::int64_t grains_of(std::int64_t count) {
  return count / kGrain + (count % kGrain != 0 ? 1 : 0);
}

SPILLWAY_HD std::int64_t grain_size(std::int64_t count, std::int64_t grain) {
  const std::int64_t left = count - grain * kGrain;
  return left < kGrain ? left : kGrain;
}

}  // namespace
}  // namespace spillway::kernels::cuda
