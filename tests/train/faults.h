// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace spillway::test {

/// What a call is refused with. Fails the present test where it throws no such fault.
template <class Fault, class Body>
std::string fault_of(const Body& body) {
  try {
    body();
  } catch (const Fault& fault) {
    return fault.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline bool holds(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace spillway::test
