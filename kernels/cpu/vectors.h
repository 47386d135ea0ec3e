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

/// 0, 1, 2, ...
SPILLWAY_HD Words iota() {
  WordPart lanes;
  for (int j = 0; j < kLanes; ++j) lanes[j] = static_cast<std::uint32_t>(j);
  return {{lanes, lanes + static_cast<std::uint32_t>(kLanes)}};
}

// ---- loads and stores ---------------------------------------------------------------------------

template <class Part, class T>
SPILLWAY_HD Pair<Part> load_wide(const T* source) {
  Pair<Part> pair;
  memcpy(&pair.part[0], source, sizeof(Part));
  memcpy(&pair.part[1], source + kLanes, sizeof(Part));
  return pair;
}
SPILLWAY_HD Floats load_floats(const float* source) {
  return load_wide<FloatPart>(source);
}
template <class Part, class T>
SPILLWAY_HD void store(T* target, Pair<Part> pair) {
  memcpy(target, &pair.part[0], sizeof(Part));
  memcpy(target + kLanes, &pair.part[1], sizeof(Part));
}

#if defined(__AVX512F__)

SPILLWAY_HD Floats root(Floats values) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_sqrt_ps(values.part[k])); });
}
SPILLWAY_HD Floats clean(Floats values) {  // what is not above zero, and NaN: zero
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_max_ps(values.part[k], __m512{})); });
}
SPILLWAY_HD Words larger(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm512_max_epu32(__m512i(a.part[k]), __m512i(b.part[k]))); });
}
SPILLWAY_HD Words smaller(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm512_min_epu32(__m512i(a.part[k]), __m512i(b.part[k]))); });
}
SPILLWAY_HD Words low_halves_minus(Words a, Words b) {  // never below zero
  return both<WordPart>([&](int k) { return WordPart(_mm512_subs_epu16(__m512i(a.part[k]), __m512i(b.part[k]))); });
}
SPILLWAY_HD Words low_halves_times_high(Words a, std::uint16_t b) {  // the upper 16 bits of products of the lower ones
  return both<WordPart>([&](int k) { return WordPart(_mm512_mulhi_epu16(__m512i(a.part[k]), _mm512_set1_epi32(b))); });
}
SPILLWAY_HD Floats to_floats(Words integers) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_cvtepi32_ps(__m512i(integers.part[k]))); });
}
SPILLWAY_HD Words to_integers(Floats values) {  // to nearest even
  return both<WordPart>([&](int k) { return WordPart(_mm512_cvtps_epi32(values.part[k])); });
}
/// table[index mod kLanes].
SPILLWAY_HD Floats look_up(const float* table, Words index) {
  const __m512 entries = _mm512_load_ps(table);
  return both<FloatPart>([&](int k) { return FloatPart(_mm512_permutexvar_ps(__m512i(index.part[k]), entries)); });
}
SPILLWAY_HD Words load_halves(const std::uint16_t* source) {
  return both<WordPart>([&](int k) {
    return WordPart(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD Words load_bytes(const std::uint8_t* source) {
  return both<WordPart>([&](int k) {
    return WordPart(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes * k))));
  });
}
/// The lower 16 bits of each word, of which the upper ones are zero.
SPILLWAY_HD void store_halves(std::uint16_t* target, Words words) {
  for (int k = 0; k < 2; ++k) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + kLanes * k), _mm512_cvtepi32_epi16(__m512i(words.part[k])));
  }
}
SPILLWAY_HD void store_bytes(std::uint8_t* target, Words words) {
  for (int k = 0; k < 2; ++k) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + kLanes * k), _mm512_cvtepi32_epi8(__m512i(words.part[k])));
  }
}
SPILLWAY_HD Floats load_f16(const std::uint16_t* source) {
  return both<FloatPart>([&](int k) {
    return FloatPart(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD void store_f16(std::uint16_t* target, Floats values) {
  for (int k = 0; k < 2; ++k) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + kLanes * k), _mm512_cvtps_ph(values.part[k], 0));
  }
}

#else

SPILLWAY_HD Floats root(Floats values) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm256_sqrt_ps(values.part[k])); });
}
SPILLWAY_HD Floats clean(Floats values) {
  return both<FloatPart>([&](int k) { return FloatPart(_mm256_max_ps(values.part[k], __m256{})); });
}
SPILLWAY_HD Words larger(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm256_max_epu32(__m256i(a.part[k]), __m256i(b.part[k]))); });
}
SPILLWAY_HD Words smaller(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm256_min_epu32(__m256i(a.part[k]), __m256i(b.part[k]))); });
}
SPILLWAY_HD Words low_halves_minus(Words a, Words b) {
  return both<WordPart>([&](int k) { return WordPart(_mm256_subs_epu16(__m256i(a.part[k]), __m256i(b.part[k]))); });
}
SPILLWAY_HD Words low_halves_times_high(Words a, std::uint16_t b) {
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
SPILLWAY_HD Words load_halves(const std::uint16_t* source) {
  return both<WordPart>([&](int k) {
    return WordPart(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD Words load_bytes(const std::uint8_t* source) {
  return both<WordPart>([&](int k) {
    return WordPart(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD __m256i packed_halves(Words words) {
  const __m256i by_lane = _mm256_packus_epi32(__m256i(words.part[0]), __m256i(words.part[1]));
  return _mm256_permute4x64_epi64(by_lane, 0xd8);
}
SPILLWAY_HD void store_halves(std::uint16_t* target, Words words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), packed_halves(words));
}
SPILLWAY_HD void store_bytes(std::uint8_t* target, Words words) {
  const __m256i halves = packed_halves(words);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                   _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
SPILLWAY_HD Floats load_f16(const std::uint16_t* source) {
  return both<FloatPart>([&](int k) {
    return FloatPart(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes * k))));
  });
}
SPILLWAY_HD void store_f16(std::uint16_t* target, Floats values) {
  for (int k = 0; k < 2; ++k) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + kLanes * k), _mm256_cvtps_ph(values.part[k], 0));
  }
}

#endif

}  // namespace
}  // namespace spillway::kernels
