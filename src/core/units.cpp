// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/units.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "core/strict_json.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr std::string_view kSpaces = " \t\r\n";
constexpr std::int64_t kKi = 1024;
constexpr std::int64_t kK = 1000;

struct Unit {
  std::string_view name;
  std::int64_t factor;
};
constexpr std::array<Unit, 18> kUnits{{{"", 1},
                                       {"b", 1},
                                       {"k", kKi},
                                       {"m", kKi* kKi},
                                       {"g", kKi* kKi* kKi},
                                       {"t", kKi* kKi* kKi* kKi},
                                       {"kb", kK},
                                       {"mb", kK* kK},
                                       {"gb", kK* kK* kK},
                                       {"tb", kK* kK* kK* kK},
                                       {"kib", kKi},
                                       {"mib", kKi* kKi},
                                       {"gib", kKi* kKi* kKi},
                                       {"tib", kKi* kKi* kKi* kKi},
                                       {"ki", kKi},
                                       {"mi", kKi* kKi},
                                       {"gi", kKi* kKi* kKi},
                                       {"ti", kKi* kKi* kKi* kKi}}};

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

std::optional<std::int64_t> unit_factor(std::string_view unit) {
  std::string lower(unit);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const Unit& entry : kUnits) {
    if (entry.name == lower) return entry.factor;
  }
  return std::nullopt;
}

// A number and a unit's factor. `whole` is the number where it was written without point and exponent: sizes above 2^53
// are not exact in a double.
struct Amount {
  double number = 0;
  std::optional<std::int64_t> whole;
  std::int64_t factor = 1;
};

std::optional<Amount> split_amount(std::string_view text) {
  Amount amount;
  const char* last = text.data() + text.size();
  const auto [end, status] = std::from_chars(text.data(), last, amount.number);
  const bool out_of_range = status == std::errc::result_out_of_range;
  if ((status != std::errc() && !out_of_range) || text.starts_with('-')) return std::nullopt;
  if (!out_of_range && !std::isfinite(amount.number)) return std::nullopt;
  if (out_of_range) amount.number = std::numeric_limits<double>::infinity();
  const auto factor = unit_factor(trimmed({end, last}));
  if (!factor) return std::nullopt;
  amount.factor = *factor;
  std::int64_t whole = 0;
  const auto [whole_end, whole_status] = std::from_chars(text.data(), end, whole);
  if (whole_status == std::errc() && whole_end == end) amount.whole = whole;
  return amount;
}

[[noreturn]] void refuse(std::string_view text, std::string_view what, std::string_view example) {
  throw InvalidArgument(
      fmt::format("{} is not a {}: expected a number and a unit, such as {}", in_quotes(text), what, example));
}

// "Gb" as network equipment writes it: eight times less than what it would be read as.
bool means_bits(std::string_view unit) {
  return unit.size() >= 2 && unit.back() == 'b' && std::isupper(static_cast<unsigned char>(unit.front())) != 0;
}

}  // namespace

Bytes parse_bytes(std::string_view text) {
  const auto amount = split_amount(trimmed(text));
  if (!amount) refuse(text, "size", "64MiB, 1.5GB or 4096");
  const InvalidArgument too_large(fmt::format("{} is too large: at most 2^63-1 bytes", in_quotes(text)));
  if (amount->whole) {
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(*amount->whole, amount->factor, &bytes)) throw too_large;
    return {bytes};
  }
  const double bytes = amount->number * static_cast<double>(amount->factor);
  if (bytes >= 0x1p63) throw too_large;
  if (amount->factor == 1 && bytes != std::floor(bytes)) refuse(text, "size of whole bytes", "64MiB, 1.5GB or 4096");
  return {std::llround(bytes)};
}

double parse_bandwidth(std::string_view text) {
  std::string_view plain = trimmed(text);
  for (const std::string_view suffix : {"/s", "/S"}) {
    if (plain.ends_with(suffix)) {
      plain = trimmed(plain.substr(0, plain.size() - suffix.size()));
      break;
    }
  }
  const auto amount = split_amount(plain);
  if (!amount) refuse(text, "bandwidth", "12GB/s or 900MiB/s");
  const auto unit = plain.find_first_not_of("0123456789.eE+- \t");
  if (unit != std::string_view::npos && means_bits(plain.substr(unit))) {
    refuse(text, "bandwidth in bytes (a lower-case b means bits)", "12GB/s or 900MiB/s");
  }
  const double bytes = amount->number * static_cast<double>(amount->factor);
  if (!(bytes > 0) || !std::isfinite(bytes)) {
    throw InvalidArgument(fmt::format("{} is not a bandwidth: it must be above zero and finite", in_quotes(text)));
  }
  return bytes;
}

std::string to_string(Bytes bytes) {
  static constexpr std::array<const char*, 6> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double amount = static_cast<double>(bytes.value);
  std::size_t unit = 0;
  // 1023.5 is where the rounding below would write 1024.
  while (std::abs(amount) >= (unit == 0 ? 1024 : 1023.5) && unit + 1 < kNames.size()) {
    amount /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes.value);
  const double magnitude = std::abs(amount);
  return fmt::format("{:.{}f} {}", amount, magnitude < 9.995 ? 2 : magnitude < 99.95 ? 1 : 0, kNames[unit]);
}

}  // namespace spillway
