// SPDX-License-Identifier: Apache-2.0
#pragma once

// A strip of elements in two wide registers, and what moves it between memory's types and fp32: the sets with AVX2 or
// AVX-512 only. The compiler's own vector types carry the arithmetic, each operation rounded on its own as for one
// element; instructions that it does not find by itself are asked for by name. Everything here is always inlined.

#include <immintrin.h>

#include "kernels/arithmetic.h"

namespace spillway::kernels {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr std::int64_t kStrip = 2 * kLanes;  // elements

using FloatPart = float __attribute__((vector_size(4 * kLanes)));
using WordPart = std::uint32_t __attribute__((vector_size(4 * kLanes)));

template <class Part>
struct Pair {
  Part part[2];
};
using Floats = Pair<FloatPart>;
using Words = Pair<WordPart>;

#define SPILLWAY_BINARY(op)                                        \
  template <class Part>                                            \
  SPILLWAY_HD Pair<Part> operator op(Pair<Part> a, Pair<Part> b) { \
    return {{a.part[0] op b.part[0], a.part[1] op b.part[1]}};     \
  }                                                                \
  template <class Part, class Scalar>                              \
  SPILLWAY_HD Pair<Part> operator op(Pair<Part> a, Scalar b) {     \
    return {{a.part[0] op b, a.part[1] op b}};                     \
  }
SPILLWAY_BINARY(+)
SPILLWAY_BINARY(-)
SPILLWAY_BINARY(*)
SPILLWAY_BINARY(/)
SPILLWAY_BINARY(&)
SPILLWAY_BINARY(|)
SPILLWAY_BINARY(^)
#undef SPILLWAY_BINARY

SPILLWAY_HD Floats operator*(float a, Floats b) {
  return b * a;  // one rounding either way
}
SPILLWAY_HD Words operator>>(Words a, int bits) {
  return {{a.part[0] >> bits, a.part[1] >> bits}};
}
SPILLWAY_HD Words operator<<(Words a, int bits) {
  return {{a.part[0] << bits, a.part[1] << bits}};
}

SPILLWAY_HD Words bits_of(Floats values) {
  return {{reinterpret_cast<WordPart>(values.part[0]), reinterpret_cast<WordPart>(values.part[1])}};
}
SPILLWAY_HD Floats float_of(Words bits) {
  return {{reinterpret_cast<FloatPart>(bits.part[0]), reinterpret_cast<FloatPart>(bits.part[1])}};
}

/// Calls make(0) and make(1) for the two halves.
template <class Part, class Make>
SPILLWAY_HD Pair<Part> both(const Make& make) {
  return {{make(0), make(1)}};
}

SPILLWAY_HD Floats broadcast(float value) {
  return both<FloatPart>([&](int) { return FloatPart{} + value; });
}
SPILLWAY_HD Words broadcast(std::uint32_t value) {
  return both<WordPart>([&](int) { return WordPart{} + value; });
}

/// Where `values` are NaN, `other`, else `bits`.
SPILLWAY_HD Words where_nan(Floats values, Words other, Words bits) {
  return both<WordPart>([&](int k) {
    const FloatPart v = values.part[k];
    return v != v ? other.part[k] : bits.part[k];
  });
}

SPILLWAY_HD Floats sign(Floats u) {
  return both<FloatPart>([&](int k) {
    const FloatPart v = u.part[k], zero = v - v, one = FloatPart{} + 1.0f;
    return v > 0 ? one : v < 0 ? -one : v == 0 ? FloatPart{} : zero;  // NaN - NaN
  });
}

/// 1 where values are above zero, else 0.
SPILLWAY_HD Words one_above_zero(Floats values) {
  return both<WordPart>([&](int k) { return reinterpret_cast<WordPart>(values.part[k] > 0) & 1u; });
}

SPILLWAY_HD std::uint32_t largest_of(Words words) {
  std::uint32_t largest = 0;
  for (int k = 0; k < 2; ++k) {
    for (int j = 0; j < kLanes; ++j) largest = words.part[k][j] > largest ? words.part[k][j] : largest;
  }
  return largest;
}

/// How the elements of a strip lie in its two registers. Halves of 16 bits come apart into even and odd elements, and
/// together again, in two instructions; fp32 in memory is in its natural order.
enum class Order { natural, even_odd };

/// The places of elements in a strip: 0, 1, 2, ... in their order.
template <Order kOrder>
SPILLWAY_HD Words places() {
  constexpr bool kNatural = kOrder == Order::natural;
  WordPart lanes;
  for (int j = 0; j < kLanes; ++j) lanes[j] = static_cast<std::uint32_t>(kNatural ? j : 2 * j);
  return {{lanes, lanes + static_cast<std::uint32_t>(kNatural ? kLanes : 1)}};
}

// ---- what each instruction set says its own way -------------------------------------------------
// even_odd, natural: from one order to the other. even_below_odd: halves of `odd` where its upper ones are, of `even`
// below. bytes_as_halves and back: as many as a strip has. pack_halves: the lower 16 bits of words in natural order.

#if defined(__AVX512F__)

SPILLWAY_HD Floats root(Floats values) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_sqrt_ps(values.part[k])); });
}
SPILLWAY_HD Floats above_zero(Floats values) {  // what is not, and NaN: zero
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_max_ps(values.part[k], __m512{})); });
}
SPILLWAY_HD Words larger(Words a, Words b) {  // of signed numbers
  return both<WordPart>([&](int k) { return WordPart(_mm512_max_epi32(__m512i(a.part[k]), __m512i(b.part[k]))); });
}
SPILLWAY_HD Floats to_floats(Words integers) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_cvtepi32_ps(__m512i(integers.part[k]))); });
}
SPILLWAY_HD Words to_integers(Floats values) {  // to nearest even; NaN: the smallest integer
  return both<WordPart>([&](int k) { return WordPart(_mm512_cvtps_epi32(values.part[k])); });
}
/// table[index mod kLanes].
SPILLWAY_HD Floats look_up(const float* table, Words index) {
  const __m512 entries = _mm512_load_ps(table);
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_permutexvar_ps(__m512i(index.part[k]), entries)); });
}
/// table[index mod 32].
SPILLWAY_HD Floats look_up_32(const float* table, Words index) {
  const __m512 first = _mm512_load_ps(table), second = _mm512_load_ps(table + 16);
  return both<FloatPart>(
      [&](int k) { return FloatPart(_mm512_permutex2var_ps(first, __m512i(index.part[k]), second)); });
}
SPILLWAY_HD Floats even_odd(Floats values) {
  const WordPart even = places<Order::even_odd>().part[0];
  return both<FloatPart>([&](int k) {
    const WordPart index = even + static_cast<std::uint32_t>(k);
    return FloatPart(_mm512_permutex2var_ps(values.part[0], __m512i(index), values.part[1]));
  });
}
SPILLWAY_HD Floats natural(Floats values) {
  const WordPart place = places<Order::natural>().part[0];
  return both<FloatPart>([&](int k) {
    const WordPart index = (place >> 1) + static_cast<std::uint32_t>(8 * k) + ((place & 1u) << 4);
    return FloatPart(_mm512_permutex2var_ps(values.part[0], __m512i(index), values.part[1]));
  });
}
SPILLWAY_HD WordPart even_below_odd(WordPart even, WordPart odd) {
  return WordPart(_mm512_mask_blend_epi16(0xaaaaaaaau, __m512i(even), __m512i(odd)));
}
SPILLWAY_HD WordPart bytes_as_halves(const std::uint8_t* source) {
  return WordPart(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))));
}
SPILLWAY_HD void store_halves_as_bytes(std::uint8_t* target, WordPart halves) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi16_epi8(__m512i(halves)));
}
SPILLWAY_HD Words load_halves(const std::uint16_t* source) {
  return both<WordPart>([&](int k) {
    return WordPart(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD WordPart pack_halves(Words words) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(__m512i(words.part[0])));
  return WordPart(_mm512_inserti64x4(low, _mm512_cvtepi32_epi16(__m512i(words.part[1])), 1));
}
SPILLWAY_HD void stream(void* target, WordPart words) {
  _mm512_stream_si512(static_cast<__m512i*>(target), __m512i(words));
}
SPILLWAY_HD Floats load_f16(const std::uint16_t* source) {
  return both<FloatPart>([&](int k) {
    return FloatPart(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD WordPart pack_f16(Floats values) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(values.part[0], 0));
  return WordPart(_mm512_inserti64x4(low, _mm512_cvtps_ph(values.part[1], 0), 1));
}

#else

SPILLWAY_HD Floats root(Floats values) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm256_sqrt_ps(values.part[k])); });
}
SPILLWAY_HD Floats above_zero(Floats values) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm256_max_ps(values.part[k], __m256{})); });
}
SPILLWAY_HD Words larger(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm256_max_epi32(__m256i(a.part[k]), __m256i(b.part[k]))); });
}
SPILLWAY_HD Words smaller(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm256_min_epu32(__m256i(a.part[k]), __m256i(b.part[k]))); });
}
SPILLWAY_HD Words low_halves_minus(Words a, Words b) {  // never below zero
  return both<WordPart>([&](int k) { return WordPart(_mm256_subs_epu16(__m256i(a.part[k]), __m256i(b.part[k]))); });
}
SPILLWAY_HD Words low_halves_times(Words a, std::uint16_t b) {  // the upper 16 bits of the products
  return both<WordPart>([&](int k) { return WordPart(_mm256_mulhi_epu16(__m256i(a.part[k]), _mm256_set1_epi32(b))); });
}
SPILLWAY_HD Floats to_floats(Words integers) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm256_cvtepi32_ps(__m256i(integers.part[k]))); });
}
SPILLWAY_HD Words to_integers(Floats values) {
  return both<WordPart>([&](int k) { return WordPart(_mm256_cvtps_epi32(values.part[k])); });
}
SPILLWAY_HD Floats look_up(const float* table, Words index) {
  const __m256 entries = _mm256_load_ps(table);
  return both<FloatPart>([&](int k) { return FloatPart(_mm256_permutevar8x32_ps(entries, __m256i(index.part[k]))); });
}
SPILLWAY_HD Floats even_odd(Floats values) {
  const __m256 low = _mm256_permute2f128_ps(values.part[0], values.part[1], 0x20);
  const __m256 high = _mm256_permute2f128_ps(values.part[0], values.part[1], 0x31);
  return {{FloatPart(_mm256_shuffle_ps(low, high, 0x88)), FloatPart(_mm256_shuffle_ps(low, high, 0xdd))}};
}
SPILLWAY_HD Floats natural(Floats values) {
  const __m256 low = _mm256_unpacklo_ps(values.part[0], values.part[1]);
  const __m256 high = _mm256_unpackhi_ps(values.part[0], values.part[1]);
  return {{FloatPart(_mm256_permute2f128_ps(low, high, 0x20)), FloatPart(_mm256_permute2f128_ps(low, high, 0x31))}};
}
SPILLWAY_HD WordPart even_below_odd(WordPart even, WordPart odd) {
  return WordPart(_mm256_blend_epi16(__m256i(even), __m256i(odd), 0xaa));
}
SPILLWAY_HD WordPart bytes_as_halves(const std::uint8_t* source) {
  return WordPart(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}
SPILLWAY_HD void store_halves_as_bytes(std::uint8_t* target, WordPart halves) {
  const __m128i low = _mm256_castsi256_si128(__m256i(halves)), high = _mm256_extracti128_si256(__m256i(halves), 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm_packus_epi16(low, high));
}
SPILLWAY_HD Words load_halves(const std::uint16_t* source) {
  return both<WordPart>([&](int k) {
    return WordPart(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD WordPart pack_halves(Words words) {
  const __m256i by_lane = _mm256_packus_epi32(__m256i(words.part[0]), __m256i(words.part[1]));
  return WordPart(_mm256_permute4x64_epi64(by_lane, 0xd8));
}
SPILLWAY_HD void stream(void* target, WordPart words) {
  _mm256_stream_si256(static_cast<__m256i*>(target), __m256i(words));
}
SPILLWAY_HD Floats load_f16(const std::uint16_t* source) {
  return both<FloatPart>([&](int k) {
    return FloatPart(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD WordPart pack_f16(Floats values) {
  const __m256i low = _mm256_castsi128_si256(_mm256_cvtps_ph(values.part[0], 0));
  return WordPart(_mm256_inserti128_si256(low, _mm256_cvtps_ph(values.part[1], 0), 1));
}

#endif

// ---- loads and stores ---------------------------------------------------------------------------

template <Order kOrder>
SPILLWAY_HD Floats load_floats(const float* source) {
  Floats values;  // each register on its own: compilers move larger things through memory
  memcpy(&values.part[0], source, sizeof(FloatPart));
  memcpy(&values.part[1], source + kLanes, sizeof(FloatPart));
  return kOrder == Order::natural ? values : even_odd(values);
}
template <Order kOrder>
SPILLWAY_HD void store_floats(float* target, Floats values) {
  const Floats ordered = kOrder == Order::natural ? values : natural(values);
  memcpy(target, &ordered.part[0], sizeof(FloatPart));
  memcpy(target + kLanes, &ordered.part[1], sizeof(FloatPart));
}

/// Halves as the upper 16 bits of words, zeros below.
template <Order kOrder>
SPILLWAY_HD Words load_upper(const std::uint16_t* source) {
  if constexpr (kOrder == Order::natural) return load_halves(source) << 16;
  WordPart both_halves;
  memcpy(&both_halves, source, sizeof(both_halves));
  return {{both_halves << 16, both_halves & 0xffff0000u}};
}

/// Halves as numbers with a sign.
template <Order kOrder>
SPILLWAY_HD Words load_signed(const std::uint16_t* source) {
  using Signed = std::int32_t __attribute__((vector_size(4 * kLanes)));
  const Words upper = load_upper<kOrder>(source);
  return both<WordPart>(
      [&](int k) { return reinterpret_cast<WordPart>(reinterpret_cast<Signed>(upper.part[k]) >> 16); });
}

template <Order kOrder>
SPILLWAY_HD WordPart pack_upper(Words words) {
  if constexpr (kOrder == Order::natural) return pack_halves(words >> 16);
  return even_below_odd(words.part[0] >> 16, words.part[1]);
}

template <Order kOrder>
SPILLWAY_HD WordPart pack_lower(Words words) {
  if constexpr (kOrder == Order::natural) return pack_halves(words & 0xffffu);
  return even_below_odd(words.part[0], words.part[1] << 16);
}

SPILLWAY_HD void store_packed(std::uint16_t* target, WordPart halves) {
  memcpy(target, &halves, sizeof(halves));
}

/// Asks for what a strip at `at` will need some strips later, as far as the second cache. Addresses past an array's end
/// do nothing.
template <class T>
SPILLWAY_HD void prefetch_strip(const T* at) {
  constexpr int kAhead = 1024, kLine = 64;  // bytes
  for (int line = 0; line < kStrip * static_cast<int>(sizeof(T)); line += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead + line, _MM_HINT_T1);
  }
}

/// Bytes as numbers, even and odd ones.
SPILLWAY_HD Words load_bytes(const std::uint8_t* source) {
  const WordPart halves = bytes_as_halves(source);
  return {{halves & 0xffffu, halves >> 16}};
}
/// The lower eight bits of even and odd elements, which are below 256 or have nothing in these bits.
SPILLWAY_HD void store_bytes(std::uint8_t* target, Words words) {
  store_halves_as_bytes(target, even_below_odd(words.part[0], words.part[1] << 16));
}

}  // namespace
}  // namespace spillway::kernels
