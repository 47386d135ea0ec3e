// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace spillway {

/// A count of bytes.
struct Bytes {
  std::int64_t value = 0;

  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr Bytes& operator+=(Bytes other) { return value += other.value, *this; }
  constexpr Bytes& operator-=(Bytes other) { return value -= other.value, *this; }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return {a.value + b.value}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return {a.value - b.value}; }
  friend constexpr Bytes operator*(Bytes a, std::int64_t n) { return {a.value * n}; }
};

/// A time span.
struct Seconds {
  double value = 0;
  constexpr auto operator<=>(const Seconds&) const = default;
};

/// Reads "64MiB", "1.5 GB", "4096", "2g": decimal and binary units, case-insensitive; a bare number is bytes, and a
/// bare letter (k, m, g, t) is the binary unit. Whole numbers are exact, others rounded to the nearest byte.
/// Throws: InvalidArgument naming the text and the form expected; also where the value is negative, does not fit in 63
/// bits, or is a fraction of a byte without a unit.
Bytes parse_bytes(std::string_view text);

/// Reads "12GB/s" or "900 MiB/s" as bytes a second; "/s" may be left out. Throws: as parse_bytes; also for zero and for
/// "Gb/s", which means bits elsewhere.
double parse_bandwidth(std::string_view text);

/// "64.0 MiB": three significant figures, binary units.
std::string to_string(Bytes bytes);

}  // namespace spillway
