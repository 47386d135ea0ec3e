// SPDX-License-Identifier: Apache-2.0
#include "core/strict_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

namespace spillway {
namespace {

using Json = nlohmann::json;
constexpr int kDeepest = 32;

// Sees every event of a parse; the parser itself keeps the last of two equal keys without a word.
class Watch {
 public:
  bool operator()(int depth, Json::parse_event_t event, const Json& value) {
    const auto level = static_cast<std::size_t>(depth);
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
      if (depth >= kDeepest) throw JsonFault(fmt::format("it nests deeper than {} levels", kDeepest));
      keys_.resize(std::max(keys_.size(), level + 2));
      keys_[level + 1].clear();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_.at(level).insert(key).second) throw JsonFault(fmt::format("the key {} stands twice", in_quotes(key)));
    }
    return true;
  }

 private:
  std::vector<std::set<std::string>> keys_;
};

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 200;
  const bool cut = text.size() > kLongest;
  std::string shown = Json(text.substr(0, kLongest)).dump(-1, ' ', false, Json::error_handler_t::replace);
  if (cut) shown += "...";
  return shown;
}

std::string shown(const Json& value) {
  constexpr std::size_t kLongest = 100;
  if (value.is_structured() && value.size() > kLongest) return value.is_array() ? "a long array" : "a large object";
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

std::string json_fault_text(const Json::exception& error) {
  constexpr std::size_t kLongest = 300;  // the library quotes the last word, which can be as long as the file
  std::string text = error.what();
  const auto end = text.find("] ");
  if (end != std::string::npos) text.erase(0, end + 2);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

Json parse_strict_object(std::string_view text) {
  if (text.find('\0') != std::string_view::npos) throw JsonFault("it holds a NUL byte");
  Json parsed;
  try {
    Watch watch;
    parsed = Json::parse(
        text, [&watch](int depth, Json::parse_event_t event, Json& value) { return watch(depth, event, value); });
  } catch (const Json::exception& error) {
    throw JsonFault(fmt::format("it is not valid JSON: {}", json_fault_text(error)));
  }
  if (!parsed.is_object()) throw JsonFault("it is not a JSON object");
  return parsed;
}

}  // namespace spillway
