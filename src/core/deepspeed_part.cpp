// SPDX-License-Identifier: Apache-2.0
#include "core/deepspeed_part.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "core/deepspeed_keys.h"
#include "core/strict_json.h"
#include "spillway/core/error.h"
#include "spillway/core/nearest.h"

namespace spillway {
namespace {

using nlohmann::json;

const json kEnabled = {{"enabled", true}};
const json kDisabled = {{"enabled", false}};

bool says_auto(const json& value) {
  return value.is_string() && value.get_ref<const std::string&>() == "auto";
}

}  // namespace

std::optional<double> lenient_number(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  const auto& text = value.get_ref<const std::string&>();
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, fault] = std::from_chars(text.data(), end, number);
  if (fault != std::errc() || rest != end || !std::isfinite(number)) return std::nullopt;
  return number;
}

DeepSpeedPart::DeepSpeedPart(const json& object, std::string section, DeepSpeedFile& file)
    : object_(&object), section_(std::move(section)), file_(&file) {
  for (const auto& [key, value] : object.items()) check_key(key, value);
}

void DeepSpeedPart::check_key(const std::string& key, const json& value) const {
  const DeepSpeedKeyRule* rule = find_deepspeed_key(section_, key);
  if (rule == nullptr) {
    const std::string nearest = likely_name(key, deepspeed_keys(section_));
    throw InvalidArgument(
        fmt::format("{}: unknown key {}{}", section_.empty() ? file_->source : file_->source + ": " + section_,
                    in_quotes(key), nearest.empty() ? "" : fmt::format("; did you mean \"{}\"?", nearest)));
  }
  if (rule->rule == DeepSpeedKey::without_effect) file_->ignored.push_back(path(key));
  const bool refused = (rule->rule == DeepSpeedKey::refused_if_on && is_on(value)) ||
                       (rule->rule == DeepSpeedKey::refused_if_enabled && is_enabled(value));
  require(!refused, fmt::format("{}: {} would change what is computed, and is not available; {}", where(key.c_str()),
                                shown(value), rule->instead));
}

std::string DeepSpeedPart::path(const std::string& key) const {
  return section_.empty() ? key : section_ + "." + key;
}

std::string DeepSpeedPart::where(const char* key) const {
  return fmt::format("{}: {}", file_->source, path(key));
}

void DeepSpeedPart::give(const char* own_key, const char* key) const {
  file_->loaded.origins[own_key] = where(key) + (has(key) ? "" : " (not given: DeepSpeed's default)");
}

const json* DeepSpeedPart::find(const char* key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() || says_auto(*found) ? nullptr : &*found;
}

bool DeepSpeedPart::is_auto(const char* key) const {
  const auto found = object_->find(key);
  return found != object_->end() && says_auto(*found);
}

std::optional<DeepSpeedPart> DeepSpeedPart::part(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  require(value->is_object(), fmt::format("{}: expected an object, found {}", where(key), shown(*value)));
  return DeepSpeedPart(*value, path(key), *file_);
}

std::optional<DeepSpeedPart> DeepSpeedPart::switched_part(const char* key) const {
  const json* value = find(key);
  if (value == nullptr || !value->is_boolean()) return part(key);
  return DeepSpeedPart(value->get<bool>() ? kEnabled : kDisabled, path(key), *file_);
}

std::optional<double> DeepSpeedPart::number(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<double> number = lenient_number(*value);
  require(number.has_value(), fmt::format("{}: expected a number, found {}", where(key), shown(*value)));
  return number;
}

std::optional<std::int64_t> DeepSpeedPart::integer(const char* key, std::int64_t least, std::int64_t most) const {
  const std::optional<double> value = number(key);
  if (!value) return std::nullopt;
  require(
      *value == std::floor(*value) && *value >= static_cast<double>(least) && *value <= static_cast<double>(most),
      fmt::format("{}: expected a whole number from {} to {}, found {}", where(key), least, most, shown(*find(key))));
  return static_cast<std::int64_t>(*value);
}

std::optional<bool> DeepSpeedPart::boolean(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  if (*value == 1 || *value == "true") return true;
  require(*value == 0 || *value == "false",
          fmt::format("{}: expected true or false, found {}", where(key), shown(*value)));
  return false;
}

std::optional<std::string> DeepSpeedPart::text(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  require(value->is_string(), fmt::format("{}: expected a string, found {}", where(key), shown(*value)));
  return value->get<std::string>();
}

}  // namespace spillway
