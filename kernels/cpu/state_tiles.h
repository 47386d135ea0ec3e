// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small forms of masters and states, one tile (a block of the 8-bit form) at a time: widened into fp32 buffers before
// an update, narrowed out of them behind it. Part of kernels_body.h: the same rules hold.

#include "kernels/arithmetic.h"
#include "kernels/state_formats.h"

namespace spillway::kernels {
namespace {

constexpr std::int64_t kTile = kBlock;  // elements: a tile of everything an update touches stays in the fastest cache

template <class Optimizer>
bool any_random(const UpdateArrays& arrays) {
  bool any = false;
  for (int k = 0; k < Optimizer::kStates; ++k) any = any || arrays.states[k].format == StateFormat::bf16;
  return any;
}

/// The random words of a tile: the low half of a word is for states of any sign, the high half for squares.
void fill_random(std::uint32_t* __restrict words, const RoundingKey& key, std::int64_t first) {
  const BlockRandom random = BlockRandom::of(key, first);
  for (std::uint32_t i = 0; i < kTile; ++i) words[i] = random.word(i);
}

void round_tile(std::uint16_t* __restrict target, const float* __restrict source, const std::uint32_t* __restrict words,
                int shift, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = StochasticBf16::narrow(source[i], words[i] >> shift & 0xffffu);
}

void widen_bf16_tile(float* __restrict target, const std::uint16_t* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Bf16::widen(source[i]);
}

template <class Form>
void decode_tile(float* __restrict target, const std::uint8_t* __restrict source, float scale, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Form::decode(source[i], scale);
}

/// Returns the block's scale. The largest magnitude is found among bits, so that a NaN is the largest of all.
template <class Form>
float encode_tile(std::uint8_t* __restrict target, const float* __restrict source, std::int64_t count) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = bits_of(source[i]) & ~kSignBit;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = Form::scale(float_of(largest));
  const BlockFactor factor = BlockFactor::of(scale);
  for (std::int64_t i = 0; i < count; ++i) target[i] = Form::encode(source[i], factor);
  return scale;
}

void split_tile(std::uint16_t* __restrict working, std::uint16_t* __restrict low, const float* __restrict source,
                std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    working[i] = Split::working(source[i]);
    low[i] = Split::low(source[i]);
  }
}

void join_tile(float* __restrict target, const std::uint16_t* __restrict working, const std::uint16_t* __restrict low,
               std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = Split::join(working[i], low[i]);
}

/// fp32 values of `state` from element `start`, which begins a block: in place, or widened into `buffer`.
float* load_state(const StateArray& state, StateKind kind, std::int64_t start, std::int64_t count, float* buffer) {
  if (state.format == StateFormat::f32) return static_cast<float*>(state.data) + start;
  if (state.format == StateFormat::bf16) {
    widen_bf16_tile(buffer, static_cast<const std::uint16_t*>(state.data) + start, count);
    return buffer;
  }
  const auto* codes = static_cast<const std::uint8_t*>(state.data) + start;
  const float scale = state.scales[start / kBlock];
  kind == StateKind::square ? decode_tile<SquareBlock8>(buffer, codes, scale, count)
                            : decode_tile<SignedBlock8>(buffer, codes, scale, count);
  return buffer;
}

/// The way back; nothing to do where the state is fp32. `words` are read for bf16 alone.
void store_state(const StateArray& state, StateKind kind, std::int64_t start, std::int64_t count, const float* values,
                 const std::uint32_t* words) {
  if (state.format == StateFormat::f32) return;
  if (state.format == StateFormat::bf16) {
    return round_tile(static_cast<std::uint16_t*>(state.data) + start, values, words,
                      kind == StateKind::square ? 16 : 0, count);
  }
  auto* codes = static_cast<std::uint8_t*>(state.data) + start;
  state.scales[start / kBlock] = kind == StateKind::square ? encode_tile<SquareBlock8>(codes, values, count)
                                                           : encode_tile<SignedBlock8>(codes, values, count);
}

float* load_master(const MasterArray& p, std::int64_t start, std::int64_t count, float* buffer) {
  if (p.f32 != nullptr) return p.f32 + start;
  join_tile(buffer, p.working + start, p.low + start, count);
  return buffer;
}

void store_master(const MasterArray& p, std::int64_t start, std::int64_t count, const float* values) {
  if (p.f32 == nullptr) split_tile(p.working + start, p.low + start, values, count);
}

// ---- conversions of whole arrays -----------------------------------------------------------------

void pack_state(const StateArray& target, StateKind kind, const float* source, std::int64_t count, std::int64_t first,
                const RoundingKey& key) {
  alignas(64) std::uint32_t words[kTile];
  for (std::int64_t start = 0; start < count; start += kTile) {
    const std::int64_t size = count - start < kTile ? count - start : kTile;
    if (target.format == StateFormat::f32) memcpy(static_cast<float*>(target.data) + start, source + start, 4 * size);
    if (target.format == StateFormat::bf16) fill_random(words, key, first + start);
    store_state(target, kind, start, size, source + start, words);
  }
}

void unpack_state(float* target, const StateArray& source, StateKind kind, std::int64_t count) {
  alignas(64) float buffer[kTile];
  for (std::int64_t start = 0; start < count; start += kTile) {
    const std::int64_t size = count - start < kTile ? count - start : kTile;
    memcpy(target + start, load_state(source, kind, start, size, buffer), 4 * size);
  }
}

}  // namespace
}  // namespace spillway::kernels
