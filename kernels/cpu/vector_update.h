// SPDX-License-Identifier: Apache-2.0
#pragma once

// Updates strip by strip, everything between load and store in registers: so loads of later strips run while earlier
// ones are computed, and no form of masters, states, gradients or copies costs a pass of its own. Forms are told apart
// by branches that a call takes one way only. The same arithmetic as state_tiles.h, which has what is left over.

#include <type_traits>

#include "kernels/cpu/state_tiles.h"
#include "kernels/cpu/vectors.h"

namespace spillway::kernels {
namespace {

// ---- 16-bit types and masters -------------------------------------------------------------------

SPILLWAY_HD Floats widen_bf16(const std::uint16_t* source) {
  return float_of(load_halves(source) << 16);
}

SPILLWAY_HD void narrow_bf16(std::uint16_t* target, Floats values) {
  const Words bits = bits_of(values);
  const Words rounded = bits + ((bits >> 16 & 1u) + 0x7fffu);
  store_halves(target, where_nan(values, bits | kQuietBit, rounded) >> 16);
}

SPILLWAY_HD void narrow_bf16_at_random(std::uint16_t* target, Floats values, Words random) {
  const Words bits = bits_of(values);
  store_halves(target, where_nan(values, bits | kQuietBit, bits + random) >> 16);
}

SPILLWAY_HD Floats load_element(const void* source, Element type, std::int64_t i) {
  if (type == Element::f32) return load_floats(static_cast<const float*>(source) + i);
  const auto* halves = static_cast<const std::uint16_t*>(source) + i;
  return type == Element::bf16 ? widen_bf16(halves) : load_f16(halves);
}

SPILLWAY_HD void store_element(void* target, Element type, std::int64_t i, Floats values) {
  if (type == Element::none) return;
  if (type == Element::f32) return store(static_cast<float*>(target) + i, values);
  auto* halves = static_cast<std::uint16_t*>(target) + i;
  type == Element::bf16 ? narrow_bf16(halves, values) : store_f16(halves, values);
}

std::int64_t widen_strips(float* target, const void* source, Element type, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kStrip <= count; i += kStrip) store(target + i, load_element(source, type, i));
  return i;
}

std::int64_t accumulate_strips(float* target, const void* source, Element type, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kStrip <= count; i += kStrip) store(target + i, load_floats(target + i) + load_element(source, type, i));
  return i;
}

std::int64_t narrow_strips(void* target, Element type, const float* source, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kStrip <= count; i += kStrip) store_element(target, type, i, load_floats(source + i));
  return i;
}

template <bool kSplit>
SPILLWAY_HD Floats load_p(const MasterArray& p, std::int64_t i) {
  if constexpr (!kSplit) return load_floats(p.f32 + i);
  const Words low = load_halves(p.low + i);
  return float_of((load_halves(p.working + i) << 16) + (low ^ 0x8000u) - 0x8000u);
}

template <bool kSplit>
SPILLWAY_HD void store_p(const MasterArray& p, std::int64_t i, Floats values) {
  if constexpr (!kSplit) return store(p.f32 + i, values);
  const Words plain = bits_of(values);
  const Words bits = where_nan(values, (plain | kQuietBit) & 0xffff0000u, plain);
  store_halves(p.working + i, (bits + 0x8000u) >> 16);
  store_halves(p.low + i, bits & 0xffffu);
}

// ---- 8-bit codes --------------------------------------------------------------------------------

/// The lines of DynamicCode by level: `offset` and `slope` by the low bits of a code's exponent as a float, `start` and
/// `rise` by level from the top.
struct CodeTables {
  alignas(64) float offset[kLanes], slope[kLanes], start[kLanes], rise[kLanes];
};

template <class Code>
constexpr CodeTables code_tables() {
  CodeTables tables{};
  for (int l = 0; l <= Code::kTop; ++l) {
    tables.offset[(127 + l) % kLanes] = Code::offset(l);
    tables.slope[(127 + l) % kLanes] = Code::slope(l);
    tables.start[l] = Code::start(l);
    tables.rise[l] = Code::rise(l);
  }
  return tables;
}

template <class Code>
constexpr CodeTables kCodeTables = code_tables<Code>();

template <class Code>
SPILLWAY_HD Floats decode_codes(Words codes) {
  const Floats number = to_floats(codes);
  const Words level = bits_of(number) >> 23;
  // Code 0 finds the line of a level whose numbers are all from code 2 on: below zero there.
  return clean(look_up(kCodeTables<Code>.offset, level) + look_up(kCodeTables<Code>.slope, level) * number);
}

template <class Code>
SPILLWAY_HD Words encode_codes(Floats values) {
  const Floats above = clean(values);
  const Words below_one = low_halves_minus(broadcast(126u), bits_of(above) >> 23);
  constexpr std::uint16_t kThird = 21846;  // of 2^16, rounded up: exact for quotients of what is this small
  const Words level = low_halves_times_high(smaller(below_one, broadcast(3u * Code::kTop)), kThird);
  return to_integers(above * look_up(kCodeTables<Code>.rise, level) + look_up(kCodeTables<Code>.start, level));
}

template <class Form>
SPILLWAY_HD Floats decode_strip(const std::uint8_t* codes, float scale) {
  const Words bytes = load_bytes(codes);
  if constexpr (Form::kSigned) {
    const Floats magnitudes = decode_codes<typename Form::Code>(bytes & 0x7fu) * scale;
    return float_of(bits_of(magnitudes) | (bytes & 0x80u) << 24);
  } else {
    const Floats part = decode_codes<typename Form::Code>(bytes) * scale;
    return part * part;
  }
}

/// Codes of a block whose values (squares: roots) are in `values`, the bits of the largest being `largest`.
template <class Form>
__attribute__((noinline)) float encode_block(std::uint8_t* codes, const float* values, std::uint32_t largest) {
  const float scale = float_of(largest);
  const BlockFactor factor = BlockFactor::of(scale);
  for (std::int64_t i = 0; i < kBlock; i += kStrip) {
    const Floats value = load_floats(values + i);
    const Floats magnitude = float_of(bits_of(value) & ~kSignBit);
    const Words code = encode_codes<typename Form::Code>(magnitude * factor.lift * factor.inverse);
    store_bytes(codes + i, Form::kSigned ? code | (bits_of(value) >> 24 & 0x80u) : larger(code, one_above_zero(value)));
  }
  return scale;
}

// ---- states -------------------------------------------------------------------------------------

/// A strip of a state of one kind in one format. `Block` is what 8-bit blocks need from strip to strip.
struct Block {
  float* values;  // new ones, which wait for the block's end; squares: their roots
  float scale;    // of the old ones
  Words largest;  // bits of the new ones so far
};

template <StateFormat kFormat, StateKind kKind>
struct StateStrip {
  static constexpr bool kSquare = kKind == StateKind::square;
  using Form = std::conditional_t<kSquare, SquareBlock8, SignedBlock8>;

  static SPILLWAY_HD Floats load(const void* data, std::int64_t i, const Block& block) {
    if constexpr (kFormat == StateFormat::f32) return load_floats(static_cast<const float*>(data) + i);
    if constexpr (kFormat == StateFormat::bf16) return widen_bf16(static_cast<const std::uint16_t*>(data) + i);
    if constexpr (kFormat == StateFormat::block8) {
      return decode_strip<Form>(static_cast<const std::uint8_t*>(data) + i, block.scale);
    }
  }

  static SPILLWAY_HD void store(void* data, std::int64_t i, Floats values, Words random, Block& block) {
    if constexpr (kFormat == StateFormat::f32) kernels::store(static_cast<float*>(data) + i, values);
    if constexpr (kFormat == StateFormat::bf16) {
      const Words own = kSquare ? random >> 16 : random & 0xffffu;
      narrow_bf16_at_random(static_cast<std::uint16_t*>(data) + i, values, own);
    }
    if constexpr (kFormat == StateFormat::block8) {
      Floats coded = values;
      if constexpr (kSquare) coded = root(values);
      block.largest = larger(block.largest, bits_of(coded) & ~kSignBit);
      kernels::store(block.values + i % kBlock, coded);
    }
  }

  static void finish(const StateArray& state, std::int64_t start, const Block& block) {
    auto* codes = static_cast<std::uint8_t*>(state.data) + start;
    state.scales[start / kBlock] = encode_block<Form>(codes, block.values, largest_of(block.largest));
  }
};

// ---- updates ------------------------------------------------------------------------------------

template <class Optimizer, StateFormat kFormat, bool kSplit>
struct VectorUpdate {
  static constexpr int kStates = Optimizer::kStates;
  template <int k>
  using Strip = StateStrip<kFormat, Optimizer::kKinds[k]>;

  template <class Scalars>
  static SPILLWAY_HD void strip(const Scalars& scalars, const UpdateArrays& arrays, std::int64_t i, Words random,
                                Block* blocks) {
    const Floats g = scalars.grad_factor * load_element(arrays.g, arrays.g_type, i);
    Floats p = load_p<kSplit>(arrays.p, i), s0, s1;
    if constexpr (kStates > 0) s0 = Strip<0>::load(arrays.states[0].data, i, blocks[0]);
    if constexpr (kStates > 1) s1 = Strip<1>::load(arrays.states[1].data, i, blocks[1]);
    if constexpr (kStates == 0) Optimizer::update(scalars, p, g);
    if constexpr (kStates == 1) Optimizer::update(scalars, p, g, s0);
    if constexpr (kStates == 2) Optimizer::update(scalars, p, g, s0, s1);
    if constexpr (kStates > 0) Strip<0>::store(arrays.states[0].data, i, s0, random, blocks[0]);
    if constexpr (kStates > 1) Strip<1>::store(arrays.states[1].data, i, s1, random, blocks[1]);
    store_p<kSplit>(arrays.p, i, p);
    store_element(arrays.copy, arrays.copy_type, i, p);
  }

  /// Elements from `begin` to `end`, which is `begin` and a number of whole strips, inside a block unless states are
  /// fp32.
  template <class Scalars>
  static SPILLWAY_HD void strips(const Scalars& scalars, const UpdateArrays& arrays, std::int64_t begin,
                                 std::int64_t end, Block* blocks) {
    BlockRandom random{};
    if constexpr (kFormat == StateFormat::bf16) random = BlockRandom::of(arrays.key, arrays.first + begin);
    for (std::int64_t i = begin; i < end; i += kStrip) {
      Words words{};
      if constexpr (kFormat == StateFormat::bf16) words = random.word(iota() + static_cast<std::uint32_t>(i - begin));
      strip(scalars, arrays, i, words, blocks);
    }
  }

  // Not inlined: a function for each form, with registers of its own.
  template <class Scalars>
  static __attribute__((noinline)) void tiles(const Scalars& given_scalars, const UpdateArrays& given,
                                              std::int64_t count) {
    const Scalars scalars = given_scalars;  // copies that no store of an element can change stay in registers
    const UpdateArrays arrays = given;
    if constexpr (kFormat == StateFormat::f32) return strips(scalars, arrays, 0, count, nullptr);
    alignas(64) float values[2][kFormat == StateFormat::block8 ? kBlock : 1];
    for (std::int64_t start = 0; start < count; start += kTile) {
      Block blocks[2] = {{values[0], 0, {}}, {values[1], 0, {}}};
      if constexpr (kFormat == StateFormat::block8) {
        for (int k = 0; k < kStates; ++k) blocks[k].scale = arrays.states[k].scales[start / kBlock];
      }
      strips(scalars, arrays, start, start + kTile, blocks);
      if constexpr (kFormat == StateFormat::block8 && kStates > 0) Strip<0>::finish(arrays.states[0], start, blocks[0]);
      if constexpr (kFormat == StateFormat::block8 && kStates > 1) Strip<1>::finish(arrays.states[1], start, blocks[1]);
    }
  }
};

/// The whole tiles of an update whose states share one format. Returns how many elements they have.
template <class Optimizer, class Scalars>
std::int64_t update_tiles(const Scalars& scalars, const UpdateArrays& arrays) {
  constexpr bool kStateless = Optimizer::kStates == 0;
  const StateFormat format = kStateless ? StateFormat::f32 : arrays.states[0].format;
  if (Optimizer::kStates == 2 && arrays.states[1].format != format) return 0;
  const std::int64_t count = arrays.count / kTile * kTile;
  const bool split = arrays.p.f32 == nullptr;
  const auto run = [&](auto form) {
    constexpr StateFormat kFormat = decltype(form)::value;
    split ? VectorUpdate<Optimizer, kFormat, true>::tiles(scalars, arrays, count)
          : VectorUpdate<Optimizer, kFormat, false>::tiles(scalars, arrays, count);
  };
  if (format == StateFormat::f32) run(std::integral_constant<StateFormat, StateFormat::f32>());
  if constexpr (!kStateless) {
    if (format == StateFormat::bf16) run(std::integral_constant<StateFormat, StateFormat::bf16>());
    if (format == StateFormat::block8) run(std::integral_constant<StateFormat, StateFormat::block8>());
  }
  return count;
}

}  // namespace
}  // namespace spillway::kernels
