// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace spillway {

struct IntegerRange {
  std::int64_t lowest = 0;
  std::int64_t highest = std::numeric_limits<std::int64_t>::max();
};

struct NumberRange {
  double lowest = 0;
  double highest = 0;
  bool above_lowest = false;  // the lowest value itself is not allowed
};

/// One JSON object of a configuration, read key by key. Each key that is asked for is known afterwards; what stays is
/// unknown. Null is a value of its own: only the readers that say so take it.
/// Throws: InvalidArgument naming source, key, value and what is expected.
class ConfigKeys {
 public:
  /// `path` stands before the keys in messages ("rope_parameters.").
  ConfigKeys(const nlohmann::json& object, std::string source, std::string path = "");

  /// The value of `key`, null included; nullptr when missing.
  const nlohmann::json* find(const std::string& key);
  bool has(const std::string& key) const { return object_.contains(key); }

  std::int64_t integer(const std::string& key, std::int64_t missing, IntegerRange range);
  /// Empty for null.
  std::optional<std::int64_t> integer_or_null(const std::string& key, std::optional<std::int64_t> missing,
                                              IntegerRange range);
  double number(const std::string& key, double missing, NumberRange range);
  bool boolean(const std::string& key, bool missing);
  std::string text(const std::string& key, const std::string& missing);

  /// Makes `key` known and refuses every value that is not in `allowed` (a JSON list).
  void only(const std::string& key, std::string_view allowed);

  /// Throws where a key was neither asked for nor is in `harmless`, with the nearest known key.
  void reject_unknown(const std::set<std::string_view>& harmless) const;

  /// Throws about `key`: "is VALUE; WHAT", or "is missing; WHAT".
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;

  const nlohmann::json& object() const { return object_; }
  const std::string& source() const { return source_; }
  const std::string& path() const { return path_; }

 private:
  const nlohmann::json& object_;
  std::string source_;
  std::string path_;
  std::set<std::string> known_;
};

}  // namespace spillway
