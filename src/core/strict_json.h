// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace spillway {

/// Text that is not acceptable JSON: what is wrong and where. Callers add the file and throw an Error of theirs.
class JsonFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Parses one JSON object, refusing what a lenient parser lets pass: a key that stands twice in an object, nesting
/// deeper than 32, NUL bytes, anything but an object. Throws: JsonFault.
nlohmann::json parse_strict_object(std::string_view text);

/// `text` of a file for a message: in quotes, escaped as JSON escapes, cut where it is long.
std::string in_quotes(std::string_view text);

/// A value for a message, cut where it is long.
std::string shown(const nlohmann::json& value);

/// The fault of a nlohmann exception without that library's own prefix.
std::string json_fault_text(const nlohmann::json::exception& error);

}  // namespace spillway
