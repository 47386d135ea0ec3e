// SPDX-License-Identifier: Apache-2.0
#pragma once

// Updates strip by strip, everything between load and store in registers: so loads of later strips run while earlier
// ones are computed, and no form of masters, states, gradients or copies costs a pass of its own. Forms are told apart
// by branches that a call takes one way only. The same arithmetic as state_tiles.h, which has what is left over.

#include <type_traits>

#include "kernels/cpu/kernel_sets.h"
#include "kernels/cpu/state_tiles.h"
#include "kernels/cpu/vectors.h"

namespace spillway::kernels {
namespace {

// ---- 16-bit types and masters -------------------------------------------------------------------

template <Order kOrder>
SPILLWAY_HD Floats widen_bf16(const std::uint16_t* source) {
  return float_of(load_upper<kOrder>(source));
}

template <Order kOrder>
SPILLWAY_HD WordPart pack_bf16(Floats values) {
  const Words bits = bits_of(values);
  const Words rounded = bits + ((bits >> 16 & 1u) + 0x7fffu);
  return pack_upper<kOrder>(where_nan(values, bits | kQuietBit, rounded));
}

template <Order kOrder>
SPILLWAY_HD Floats load_element(const void* source, Element type, std::int64_t i) {
  if (type == Element::f32) return load_floats<kOrder>(static_cast<const float*>(source) + i);
  const auto* halves = static_cast<const std::uint16_t*>(source) + i;
  if (type == Element::bf16) return widen_bf16<kOrder>(halves);
  return kOrder == Order::natural ? load_f16(halves) : even_odd(load_f16(halves));
}

/// `past_caches`: where store_streams says so.
template <Order kOrder>
SPILLWAY_HD void store_element(void* target, Element type, std::int64_t i, Floats values, bool past_caches) {
  if (type == Element::none) return;
  if (type == Element::f32) return store_floats<kOrder>(static_cast<float*>(target) + i, values);
  auto* halves = static_cast<std::uint16_t*>(target) + i;
  const Floats ordered = kOrder == Order::natural ? values : natural(values);
  const WordPart packed = type == Element::bf16 ? pack_bf16<kOrder>(values) : pack_f16(ordered);
  past_caches ? stream(halves, packed) : store_packed(halves, packed);
}

/// Whether 16-bit results go past the caches: lines of them are then not read before they are written. Only where a
/// call's arrays are larger than what a core has of the caches, and whole strips are aligned.
bool store_streams(const void* target, Element type, std::int64_t count) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 19;
  const bool half = type == Element::bf16 || type == Element::f16;
  return half && count >= kLarge && reinterpret_cast<std::uintptr_t>(target) % (2 * kStrip) == 0;
}

constexpr Order kNatural = Order::natural;

std::int64_t widen_strips(float* target, const void* source, Element type, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kStrip <= count; i += kStrip) store_floats<kNatural>(target + i, load_element<kNatural>(source, type, i));
  return i;
}

std::int64_t accumulate_strips(float* target, const void* source, Element type, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kStrip <= count; i += kStrip) {
    store_floats<kNatural>(target + i, load_floats<kNatural>(target + i) + load_element<kNatural>(source, type, i));
  }
  return i;
}

std::int64_t narrow_strips(void* target, Element type, const float* source, std::int64_t count) {
  const bool past_caches = store_streams(target, type, count);
  std::int64_t i = 0;
  for (; i + kStrip <= count; i += kStrip) {
    store_element<kNatural>(target, type, i, load_floats<kNatural>(source + i), past_caches);
  }
  if (past_caches) _mm_sfence();
  return i;
}

template <bool kSplit, Order kOrder>
SPILLWAY_HD Floats load_p(const MasterArray& p, std::int64_t i) {
  if constexpr (!kSplit) return load_floats<kOrder>(p.f32 + i);
  return float_of(load_upper<kOrder>(p.working + i) + load_signed<kOrder>(p.low + i));
}

/// `kNanIsNarrow`: a NaN has no bits in its lower half, so that nothing need be done for it to stay one.
template <bool kSplit, Order kOrder, bool kNanIsNarrow>
SPILLWAY_HD void store_p(const MasterArray& p, std::int64_t i, Floats values) {
  if constexpr (!kSplit) return store_floats<kOrder>(p.f32 + i, values);
  const Words plain = bits_of(values);
  const Words bits = kNanIsNarrow ? plain : where_nan(values, (plain | kQuietBit) & 0xffff0000u, plain);
  store_packed(p.working + i, pack_upper<kOrder>(bits + 0x8000u));
  store_packed(p.low + i, pack_lower<kOrder>(bits));
}

// ---- 8-bit codes --------------------------------------------------------------------------------

// In the order of even and odd elements throughout.

/// The lines of DynamicCode by level: `offset` and `slope` by the low bits of a code's exponent as a float, `start` and
/// `rise` by the low bits of a value's, or where registers hold only eight entries, by level from the top.
struct CodeTables {
  static constexpr int kExponents = kLanes == 16 ? 32 : 0;
  alignas(64) float offset[kLanes], slope[kLanes];
  alignas(64) float start[kExponents + 8], rise[kExponents + 8];
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
  for (int exponent = 96; exponent < 96 + CodeTables::kExponents; ++exponent) {
    const int third = exponent < 126 ? (126 - exponent) / 3 : 0;
    tables.start[exponent % 32] = Code::start(third < Code::kTop ? third : Code::kTop);
    tables.rise[exponent % 32] = Code::rise(third < Code::kTop ? third : Code::kTop);
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
  return above_zero(look_up(kCodeTables<Code>.offset, level) + look_up(kCodeTables<Code>.slope, level) * number);
}

/// `values` are not negative. NaN: the smallest integer, whose lower bits are zero.
template <class Code>
SPILLWAY_HD Words encode_codes(Floats values) {
  const CodeTables& tables = kCodeTables<Code>;
  const Words exponent = bits_of(values) >> 23;
#if defined(__AVX512F__)
  const Words index = larger(exponent, broadcast(96u));
  return to_integers(values * look_up_32(tables.rise, index) + look_up_32(tables.start, index));
#else
  constexpr std::uint16_t kThird = 21846;  // of 2^16, rounded up: exact for quotients of what is this small
  const Words below_one = smaller(low_halves_minus(broadcast(126u), exponent), broadcast(3u * Code::kTop));
  const Words level = low_halves_times(below_one, kThird);
  return to_integers(values * look_up(tables.rise, level) + look_up(tables.start, level));
#endif
}

template <class Form>
SPILLWAY_HD Floats decode_strip(const std::uint8_t* codes, float scale) {
  const Words bytes = load_bytes(codes);
  if constexpr (Form::kSigned) {
    const Floats magnitudes = decode_codes<typename Form::Code>(bytes & 0x7fu) * scale;
    return float_of(bits_of(magnitudes) | (bytes << 24 & kSignBit));
  } else {
    const Floats part = decode_codes<typename Form::Code>(bytes) * scale;
    return part * part;
  }
}

/// `kLift`: whether the factor's lift is another one than 1.
template <class Form, bool kLift>
SPILLWAY_HD void encode_values(std::uint8_t* codes, const float* values, const BlockFactor& factor) {
  for (std::int64_t i = 0; i < kBlock; i += kStrip) {
    const Floats value = load_floats<Order::natural>(values + i);
    Floats magnitude = float_of(bits_of(value) & ~kSignBit);
    if constexpr (kLift) magnitude = magnitude * factor.lift;
    const Words code = encode_codes<typename Form::Code>(magnitude * factor.inverse);
    store_bytes(codes + i, Form::kSigned ? code | (bits_of(value) >> 24 & 0x80u) : larger(code, one_above_zero(value)));
  }
}

/// Codes of a block whose values (squares: roots) are in `values`, the bits of the largest being `largest`.
template <class Form>
__attribute__((noinline)) float encode_block(std::uint8_t* codes, const float* values, std::uint32_t largest) {
  const float scale = float_of(largest);
  const BlockFactor factor = BlockFactor::of(scale);
  factor.lift != 1 ? encode_values<Form, true>(codes, values, factor)
                   : encode_values<Form, false>(codes, values, factor);
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
  static constexpr Order kOrder = kFormat == StateFormat::f32 ? Order::natural : Order::even_odd;
  static constexpr bool kSquare = kKind == StateKind::square;
  using Form = std::conditional_t<kSquare, SquareBlock8, SignedBlock8>;

  static SPILLWAY_HD Floats load(const void* data, std::int64_t i, const Block& block) {
    if constexpr (kFormat == StateFormat::f32) return load_floats<kOrder>(static_cast<const float*>(data) + i);
    if constexpr (kFormat == StateFormat::bf16) return widen_bf16<kOrder>(static_cast<const std::uint16_t*>(data) + i);
    if constexpr (kFormat == StateFormat::block8) {
      return decode_strip<Form>(static_cast<const std::uint8_t*>(data) + i, block.scale);
    }
  }

  /// `random`: of bf16 alone, whose lower half is for states of any sign, the upper one for squares.
  template <bool kNanIsNarrow>
  static SPILLWAY_HD void store(void* data, std::int64_t i, Floats values, Words random, Block& block) {
    if constexpr (kFormat == StateFormat::f32) store_floats<kOrder>(static_cast<float*>(data) + i, values);
    if constexpr (kFormat == StateFormat::bf16) {
      const Words bits = bits_of(values);
      const Words rounded = bits + (kSquare ? random >> 16 : random & 0xffffu);
      const Words safe = kNanIsNarrow ? rounded : where_nan(values, bits | kQuietBit, rounded);
      store_packed(static_cast<std::uint16_t*>(data) + i, pack_upper<kOrder>(safe));
    }
    if constexpr (kFormat == StateFormat::block8) {
      Floats coded = values;
      if constexpr (kSquare) coded = root(values);
      block.largest = larger(block.largest, bits_of(coded) & ~kSignBit);
      store_floats<Order::natural>(block.values + i % kBlock, coded);  // in the strip's own order
    }
  }

  static void finish(const StateArray& state, std::int64_t start, const Block& block) {
    auto* codes = static_cast<std::uint8_t*>(state.data) + start;
    state.scales[start / kBlock] = encode_block<Form>(codes, block.values, largest_of(block.largest));
  }
};

// ---- updates ------------------------------------------------------------------------------------

// Branches inside the loop were measured to cost up to a tenth of the speed of memory, though every call takes them one
// way only: less of what follows is under way while a strip waits for its lines. So the loop of an ordinary step has
// none: scalars and types of elements may be ones that the compiler knows.

/// Scalars of a step without L2 decay.
template <class Scalars>
struct WithoutDecay : Scalars {
  static constexpr float l2 = 0;
};

template <class Scalars>
bool has_decay(const Scalars& scalars) {
  return scalars.l2 != 0;
}
bool has_decay(const LionScalars&) {
  return false;
}

/// Types of gradients and copies: any, or these.
struct AnyTypes {
  static constexpr bool kNarrow = false;  // whether gradients are bf16
  Element g, copy;
};
template <Element kG, Element kCopy>
struct TheseTypes {
  static constexpr bool kNarrow = kG == Element::bf16;
  static constexpr Element g = kG, copy = kCopy;
};

template <class Optimizer, StateFormat kFormat, bool kSplit>
struct VectorUpdate {
  static constexpr int kStates = Optimizer::kStates;
  static constexpr Order kOrder = kFormat == StateFormat::f32 ? Order::natural : Order::even_odd;
  template <int k>
  using Strip = StateStrip<kFormat, Optimizer::kKinds[k]>;

  template <class Scalars, class Types>
  static SPILLWAY_HD void strip(const Scalars& scalars, const UpdateArrays& arrays, const Types& types, std::int64_t i,
                                Words random, Block* blocks, bool past_caches) {
    // A NaN has the payload of one of the operands it came from. Where all of those were bf16, its lower half is zero,
    // and no carry out of it can make it something else.
    constexpr bool kNarrowStates = kFormat == StateFormat::bf16 && Types::kNarrow;
    const Floats g = scalars.grad_factor * load_element<kOrder>(arrays.g, types.g, i);
    Floats p = load_p<kSplit, kOrder>(arrays.p, i), s0, s1;
    if constexpr (kStates > 0) s0 = Strip<0>::load(arrays.states[0].data, i, blocks[0]);
    if constexpr (kStates > 1) s1 = Strip<1>::load(arrays.states[1].data, i, blocks[1]);
    if constexpr (kStates == 0) Optimizer::update(scalars, p, g);
    if constexpr (kStates == 1) Optimizer::update(scalars, p, g, s0);
    if constexpr (kStates == 2) Optimizer::update(scalars, p, g, s0, s1);
    if constexpr (kStates > 0) {
      Strip<0>::template store<kNarrowStates>(arrays.states[0].data, i, s0, random, blocks[0]);
    }
    if constexpr (kStates > 1) {
      Strip<1>::template store<kNarrowStates>(arrays.states[1].data, i, s1, random, blocks[1]);
    }
    store_p<kSplit, kOrder, kNarrowStates>(arrays.p, i, p);
    store_element<kOrder>(arrays.copy, types.copy, i, p, past_caches);
  }

  /// Asks for masters and states some strips ahead. Where arrays of several widths advance together, Intel's own
  /// prefetchers fall behind (measured: one pass 14 %, split masters 6 % faster with it); of four fp32 arrays alone
  /// they do not, and this costs 3 %.
  static SPILLWAY_HD void prefetch(const UpdateArrays& arrays, std::int64_t i) {
    if constexpr (!kSplit) prefetch_strip(arrays.p.f32 + i);
    if constexpr (kSplit) prefetch_strip(arrays.p.working + i), prefetch_strip(arrays.p.low + i);
    for (int k = 0; k < kStates; ++k) {
      if constexpr (kFormat == StateFormat::f32) prefetch_strip(static_cast<const float*>(arrays.states[k].data) + i);
      if constexpr (kFormat == StateFormat::bf16)
        prefetch_strip(static_cast<const std::uint16_t*>(arrays.states[k].data) + i);
    }
  }

  /// Elements from `begin` to `end`, which is `begin` and a number of whole strips, inside a block unless states are
  /// fp32.
  template <bool kAhead, class Scalars, class Types>
  static SPILLWAY_HD void strips(const Scalars& scalars, const UpdateArrays& arrays, const Types& types,
                                 std::int64_t begin, std::int64_t end, Block* blocks, bool past_caches) {
    BlockRandom random{};
    if constexpr (kFormat == StateFormat::bf16) random = BlockRandom::of(arrays.key, arrays.first + begin);
    for (std::int64_t i = begin; i < end; i += kStrip) {
      Words words{};
      if constexpr (kFormat == StateFormat::bf16)
        words = random.word(places<kOrder>() + static_cast<std::uint32_t>(i - begin));
      if constexpr (kAhead) prefetch(arrays, i);
      strip(scalars, arrays, types, i, words, blocks, past_caches);
    }
  }

  // Not inlined: a function for each form, with registers of its own.
  template <bool kAhead, class Scalars, class Types>
  static __attribute__((noinline)) void tiles(const Scalars& given_scalars, const UpdateArrays& given,
                                              const Types& given_types, std::int64_t count) {
    const Scalars scalars = given_scalars;  // copies that no store of an element can change stay in registers
    const UpdateArrays arrays = given;
    const Types types = given_types;
    const bool past_caches = store_streams(arrays.copy, types.copy, arrays.count);
    if constexpr (kFormat == StateFormat::f32) {
      Block none[2] = {};  // fp32 has no blocks: nothing reads these
      return past_caches ? strips<kAhead>(scalars, arrays, types, 0, count, none, true)
                         : strips<kAhead>(scalars, arrays, types, 0, count, none, false);
    }
    alignas(64) float values[2][kFormat == StateFormat::block8 ? kBlock : 1];
    for (std::int64_t start = 0; start < count; start += kTile) {
      Block blocks[2] = {{values[0], 0, {}}, {values[1], 0, {}}};
      if constexpr (kFormat == StateFormat::block8) {
        for (int k = 0; k < kStates; ++k) blocks[k].scale = arrays.states[k].scales[start / kBlock];
      }
      strips<kAhead>(scalars, arrays, types, start, start + kTile, blocks, past_caches);
      if constexpr (kFormat == StateFormat::block8 && kStates > 0) Strip<0>::finish(arrays.states[0], start, blocks[0]);
      if constexpr (kFormat == StateFormat::block8 && kStates > 1) Strip<1>::finish(arrays.states[1], start, blocks[1]);
    }
  }
};

template <class Optimizer, StateFormat kFormat, bool kSplit, class Scalars>
void tiles_of_form(const Scalars& scalars, const UpdateArrays& arrays, std::int64_t count) {
  using Update = VectorUpdate<Optimizer, kFormat, kSplit>;
  using Wide = TheseTypes<Element::f32, Element::none>;
  using Half = TheseTypes<Element::bf16, kSplit ? Element::none : Element::bf16>;
  const bool decays = has_decay(scalars);
  const WithoutDecay<Scalars> plain{scalars};
  if (!decays && arrays.g_type == Wide::g && arrays.copy_type == Wide::copy) {
    return Update::template tiles<false>(plain, arrays, Wide(), count);
  }
  if (!decays && arrays.g_type == Half::g && arrays.copy_type == Half::copy) {
    return kPrefetchesAhead ? Update::template tiles<true>(plain, arrays, Half(), count)
                            : Update::template tiles<false>(plain, arrays, Half(), count);
  }
  Update::template tiles<false>(scalars, arrays, AnyTypes{arrays.g_type, arrays.copy_type}, count);
}

/// The whole tiles of an update whose states share one format. Returns how many elements they have.
template <class Optimizer, class Scalars>
std::int64_t update_tiles(const Scalars& scalars, const UpdateArrays& arrays) {
  const StateFormat format = Optimizer::kStates == 0 ? StateFormat::f32 : arrays.states[0].format;
  if (Optimizer::kStates == 2 && arrays.states[1].format != format) return 0;
  const std::int64_t count = arrays.count / kTile * kTile;
  const bool split = arrays.p.f32 == nullptr;
  const auto run = [&](auto form) {
    constexpr StateFormat kFormat = decltype(form)::value;
    split ? tiles_of_form<Optimizer, kFormat, true>(scalars, arrays, count)
          : tiles_of_form<Optimizer, kFormat, false>(scalars, arrays, count);
  };
  if (format == StateFormat::f32) run(std::integral_constant<StateFormat, StateFormat::f32>());
  if constexpr (Optimizer::kStates > 0) {
    if (format == StateFormat::bf16) run(std::integral_constant<StateFormat, StateFormat::bf16>());
    if (format == StateFormat::block8) run(std::integral_constant<StateFormat, StateFormat::block8>());
  }
  if (store_streams(arrays.copy, arrays.copy_type, arrays.count)) _mm_sfence();
  return count;
}

}  // namespace
}  // namespace spillway::kernels
