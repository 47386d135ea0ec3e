// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/config_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/config_reader.h"
#include "core/deepspeed_config.h"
#include "core/deepspeed_keys.h"
#include "core/relaxed_json.h"
#include "core/strict_json.h"
#include "spillway/core/error.h"
#include "spillway/core/nearest.h"

namespace spillway {
namespace {

using nlohmann::json;

bool is_own(const std::string& key) {
  const auto& keys = own_top_keys();
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// Dotted keys count by their first part.
bool is_deepspeeds(const std::string& key) {
  return find_deepspeed_key("", key.substr(0, key.find('.'))) != nullptr;
}

// Where no key tells: the dialect of the name that an unknown key is most like.
bool resembles_deepspeed(const std::string& key) {
  std::vector<std::string> all = own_top_keys();
  for (const std::string& name : deepspeed_keys("")) all.push_back(name);
  const std::string nearest = nearest_name(key, all);
  return !nearest.empty() && !is_own(nearest);
}

// An optimizer stands in both, but only DeepSpeed's has "params".
bool is_deepspeed(const json& document, const std::string& source) {
  std::string own, other, unknown;
  for (const auto& [key, value] : document.items()) {
    if (key == "optimizer") continue;
    if (is_own(key)) {
      own = key;
    } else if (is_deepspeeds(key)) {
      other = key;
    } else {
      unknown = key;
    }
  }
  const auto optimizer = document.find("optimizer");
  if (other.empty() && optimizer != document.end() && optimizer->is_object() && optimizer->contains("params")) {
    other = "optimizer.params";
  }
  require(own.empty() || other.empty(),
          fmt::format("{}: {} is a key of Spillway's own and {} one of DeepSpeed's; write all in one of the two",
                      source, in_quotes(own), in_quotes(other)));
  if (own.empty() && other.empty() && !unknown.empty()) return resembles_deepspeed(unknown);
  return !other.empty();
}

LoadedConfig read_own(const json& document, const std::string& source) {
  LoadedConfig loaded;
  loaded.config = read_own_config(document, source);
  for (const auto& [key, value] : document.items()) {
    if (!value.is_object()) loaded.origins[key] = fmt::format("{}: {}", source, key);
    if (!value.is_object()) continue;
    for (const auto& [inner, unused] : value.items()) {
      const std::string path = key + "." + inner;
      const std::string origin = fmt::format("{}: {}", source, path);
      if (path == "device.link_bandwidth") {  // each way, unless that has a key of its own
        loaded.origins.emplace("device.upload_bandwidth", origin);
        loaded.origins.emplace("device.download_bandwidth", origin);
      } else {
        loaded.origins[path] = origin;
      }
    }
  }
  return loaded;
}

// A schedule whose end the program sets is checked as if it were set.
void validate(const Config& config, const std::string& source) {
  Config whole = config;
  LrScheduleConfig& schedule = whole.lr_schedule;
  if (schedule.total_steps == 0) schedule.total_steps = std::max<std::int64_t>(schedule.warmup_steps, 1);
  try {
    whole.validate();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", source, error.what()));
  }
}

}  // namespace

std::string read_config_file(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  if (!stream.is_open() || stream.bad()) {
    throw FileError(fmt::format("cannot read the configuration {}", file.string()));
  }
  return text;
}

LoadedConfig parse_config(const std::string& text, const std::string& source, int ranks) {
  json document;
  try {
    document = parse_strict_object(relaxed_json(text));
  } catch (const JsonFault& fault) {
    throw InvalidArgument(fmt::format("{}: {}", source, fault.what()));
  }
  const bool foreign = is_deepspeed(document, source);
  LoadedConfig loaded = foreign ? read_deepspeed_config(document, source, ranks) : read_own(document, source);
  validate(loaded.config, source);
  return loaded;
}

LoadedConfig load_config(const std::filesystem::path& file, int ranks) {
  return parse_config(read_config_file(file), file.string(), ranks);
}

}  // namespace spillway
