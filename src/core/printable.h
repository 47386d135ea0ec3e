// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>

namespace spillway {

/// Whether a terminal would take a part of it for a command.
inline bool is_control(unsigned char c) {
  return c < ' ' || c == 127;
}

/// A name that a file or its maker chose, for people: control characters are shown as question marks.
inline std::string printable(std::string name) {
  std::replace_if(name.begin(), name.end(), is_control, '?');
  return name;
}

}  // namespace spillway
