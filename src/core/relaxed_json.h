// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace spillway {

/// The text with comments (//, /* */, #) and commas before a closing bracket replaced by spaces, outside of strings;
/// line and column of all else stay. Throws: JsonFault for a comment that does not end.
std::string relaxed_json(std::string_view text);

}  // namespace spillway
