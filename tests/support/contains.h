// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

namespace spillway::test {

/// Whether all of `parts` stand in `text`; else says which does not.
inline ::testing::AssertionResult contains(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << '"' << part << "\" does not stand in \"" << text << '"';
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace spillway::test
