// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace spillway {

/// How many insertions, deletions and replacements of one character turn `a` into `b`.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

/// The name of `names` that is most like `wanted`, for a message; empty when there is none.
template <typename Names>
std::string nearest_name(std::string_view wanted, const Names& names) {
  // A message is not worth seconds: long names and the tail of very long lists are left out.
  constexpr std::size_t kMostNames = 20000;
  constexpr std::size_t kLongestName = 256;
  std::string best;
  std::size_t best_distance = kLongestName;
  std::size_t seen = 0;
  if (wanted.size() > kLongestName) return best;
  for (const auto& name : names) {
    const std::string_view text(name);
    if (++seen > kMostNames) break;
    if (text.size() > kLongestName) continue;
    const std::size_t distance = edit_distance(wanted, text);
    if (distance < best_distance) {
      best_distance = distance;
      best = text;
    }
  }
  return best;
}

/// As nearest_name, for "did you mean": empty where even the nearest is another word rather than a slip.
template <typename Names>
std::string likely_name(std::string_view wanted, const Names& names) {
  constexpr std::size_t kFewSlips = 2;
  const std::string nearest = nearest_name(wanted, names);
  const bool likely = edit_distance(wanted, nearest) <= std::max(kFewSlips, wanted.size() / 3);
  return likely ? nearest : std::string();
}

}  // namespace spillway
