// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/units.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string>

#include "spillway/core/error.h"

namespace spillway {
namespace {

std::string lower_without_spaces(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (!std::isspace(static_cast<unsigned char>(c))) out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

// The factor of a unit's name, or 0 where it is none.
double unit_factor(std::string_view unit) {
  struct Unit {
    std::string_view name;
    double factor;
  };
  constexpr double kKi = 1024.0;
  static constexpr std::array<Unit, 18> kUnits{{{"", 1},
                                                {"b", 1},
                                                {"k", kKi},
                                                {"m", kKi * kKi},
                                                {"g", kKi * kKi * kKi},
                                                {"t", kKi * kKi * kKi * kKi},
                                                {"kb", 1e3},
                                                {"mb", 1e6},
                                                {"gb", 1e9},
                                                {"tb", 1e12},
                                                {"kib", kKi},
                                                {"mib", kKi * kKi},
                                                {"gib", kKi * kKi * kKi},
                                                {"tib", kKi * kKi * kKi * kKi},
                                                {"ki", kKi},
                                                {"mi", kKi * kKi},
                                                {"gi", kKi * kKi * kKi},
                                                {"ti", kKi * kKi * kKi * kKi}}};
  for (const Unit& entry : kUnits) {
    if (entry.name == unit) return entry.factor;
  }
  return 0;
}

double parse_amount(std::string_view original, std::string_view text, std::string_view example) {
  double number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  const double factor =
      status == std::errc() ? unit_factor(text.substr(static_cast<std::size_t>(end - text.data()))) : 0;
  if (factor == 0 || !std::isfinite(number) || number < 0) {
    throw InvalidArgument(fmt::format("\"{}\" is not a size: expected a number and a unit, such as {}", original, example));
  }
  return number * factor;
}

}  // namespace

Bytes parse_bytes(std::string_view text) {
  const double amount = parse_amount(text, lower_without_spaces(text), "64MiB, 1.5GB or 4096");
  if (amount >= 9.2e18) throw InvalidArgument(fmt::format("\"{}\" is too large: at most 2^63-1 bytes", text));
  return {std::llround(amount)};
}

double parse_bandwidth(std::string_view text) {
  std::string plain = lower_without_spaces(text);
  for (std::string_view suffix : {"/s", "ps"}) {
    if (plain.ends_with(suffix)) {
      plain.resize(plain.size() - suffix.size());
      break;
    }
  }
  const double amount = parse_amount(text, plain, "12GB/s or 900MiB/s");
  if (amount == 0) throw InvalidArgument(fmt::format("\"{}\" is not a bandwidth: it must be above zero", text));
  return amount;
}

std::string to_string(Bytes bytes) {
  static constexpr std::array<const char*, 6> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double amount = static_cast<double>(bytes.value);
  std::size_t unit = 0;
  while (std::abs(amount) >= 1024 && unit + 1 < kNames.size()) {
    amount /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes.value);
  const double magnitude = std::abs(amount);
  return fmt::format("{:.{}f} {}", amount, magnitude < 10 ? 2 : magnitude < 100 ? 1 : 0, kNames[unit]);
}

}  // namespace spillway
