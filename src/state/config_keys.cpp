// SPDX-License-Identifier: Apache-2.0
#include "state/config_keys.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>
#include <vector>

#include "core/strict_json.h"
#include "spillway/core/error.h"
#include "spillway/core/nearest.h"

namespace spillway {
namespace {

using Json = nlohmann::json;

}  // namespace

ConfigKeys::ConfigKeys(const Json& object, std::string source, std::string path)
    : object_(object), source_(std::move(source)), path_(std::move(path)) {}

const Json* ConfigKeys::find(const std::string& key) {
  known_.insert(key);
  const auto at = object_.find(key);
  return at == object_.end() ? nullptr : &*at;
}

std::optional<std::int64_t> ConfigKeys::integer_or_null(const std::string& key, std::optional<std::int64_t> missing,
                                                        IntegerRange range) {
  const Json* value = find(key);
  if (value == nullptr) return missing;
  if (value->is_null()) return std::nullopt;
  const bool fits =
      value->is_number_integer() &&
      !(value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(range.highest)) &&
      value->get<std::int64_t>() >= range.lowest && value->get<std::int64_t>() <= range.highest;
  if (!fits) fail(key, fmt::format("expected an integer from {} to {}", range.lowest, range.highest));
  return value->get<std::int64_t>();
}

std::int64_t ConfigKeys::integer(const std::string& key, std::int64_t missing, IntegerRange range) {
  const auto value = integer_or_null(key, missing, range);
  if (!value) fail(key, fmt::format("expected an integer from {} to {}", range.lowest, range.highest));
  return *value;
}

double ConfigKeys::number(const std::string& key, double missing, NumberRange range) {
  const Json* value = find(key);
  if (value == nullptr) return missing;
  const double number = value->is_number() ? value->get<double>() : std::nan("");
  const bool fits = number <= range.highest && (range.above_lowest ? number > range.lowest : number >= range.lowest);
  if (!fits) {
    fail(key, fmt::format("expected a number {} {} and at most {}", range.above_lowest ? "above" : "of at least",
                          range.lowest, range.highest));
  }
  return number;
}

bool ConfigKeys::boolean(const std::string& key, bool missing) {
  const Json* value = find(key);
  if (value == nullptr) return missing;
  if (!value->is_boolean()) fail(key, "expected true or false");
  return value->get<bool>();
}

std::string ConfigKeys::text(const std::string& key, const std::string& missing) {
  const Json* value = find(key);
  if (value == nullptr) return missing;
  if (!value->is_string()) fail(key, "expected a string");
  return value->get<std::string>();
}

void ConfigKeys::only(const std::string& key, std::string_view allowed) {
  const Json* value = find(key);
  if (value == nullptr) return;
  const Json list = Json::parse(allowed);
  for (const Json& one : list) {
    // Comparing true with 1 is false in this library, comparing 1 with 1.0 is true: as wanted.
    if (one == *value) return;
  }
  std::string words;
  for (const Json& one : list) words += (words.empty() ? "" : " or ") + one.dump();
  fail(key, fmt::format("Spillway supports only {} here", words));
}

void ConfigKeys::reject_unknown(const std::set<std::string_view>& harmless) const {
  std::vector<std::string> all(known_.begin(), known_.end());
  all.insert(all.end(), harmless.begin(), harmless.end());
  for (const auto& [key, value] : object_.items()) {
    if (known_.contains(key) || harmless.contains(key)) continue;
    const std::string nearest = likely_name(key, all);
    throw InvalidArgument(fmt::format(
        "{}: the key {} is not known here{}. Remove it if it does not change the model's computation", source_,
        in_quotes(path_ + key), nearest.empty() ? "" : fmt::format("; the nearest known key is \"{}\"", nearest)));
  }
}

void ConfigKeys::fail(const std::string& key, const std::string& what) const {
  const auto at = object_.find(key);
  const std::string is = at == object_.end() ? "is missing" : fmt::format("is {}", shown(*at));
  throw InvalidArgument(fmt::format("{}: \"{}{}\" {}; {}", source_, path_, key, is, what));
}

}  // namespace spillway
