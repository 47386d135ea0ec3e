// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>

namespace spillway {

/// Whether `text` matches `pattern`, where * stands for any run of characters and ? for one.
inline bool matches(std::string_view pattern, std::string_view text) {
  // Greedy with one point to go back to: the last star and where its run ends so far.
  std::size_t p = 0, t = 0, star = std::string_view::npos, run = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      run = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++run;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace spillway
