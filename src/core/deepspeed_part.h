// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/config_file.h"

namespace spillway {

/// What the parts of one DeepSpeed file share.
struct DeepSpeedFile {
  std::string source;
  LoadedConfig loaded;
  std::vector<std::string> ignored;  // keys for the warning
};

/// One section of a DeepSpeed configuration. Its keys are checked when it is made; a value "auto" counts as not given.
/// Owns: nothing; the document and the file must outlive it.
class DeepSpeedPart {
 public:
  /// `section`: "" for the top. Throws: InvalidArgument for a key that is unknown or would change the result.
  DeepSpeedPart(const nlohmann::json& object, std::string section, DeepSpeedFile& file);

  bool has(const char* key) const { return find(key) != nullptr; }
  bool is_auto(const char* key) const;
  /// The section under a key; none where it is not given or null.
  std::optional<DeepSpeedPart> part(const char* key) const;
  /// As part; true and false stand for a section that says enabled, or not.
  std::optional<DeepSpeedPart> switched_part(const char* key) const;

  /// Numbers may stand in strings, whole ones may be written 5e8. Throws: InvalidArgument naming the key.
  std::optional<double> number(const char* key) const;
  std::optional<std::int64_t> integer(const char* key, std::int64_t least, std::int64_t most) const;
  std::optional<bool> boolean(const char* key) const;
  std::optional<std::string> text(const char* key) const;
  const nlohmann::json* find(const char* key) const;

  /// "ds.json: optimizer.params.lr".
  std::string where(const char* key) const;
  /// Notes that a value of Spillway's own comes from this key, or from DeepSpeed's default for it.
  void give(const char* own_key, const char* key) const;
  DeepSpeedFile& file() const { return *file_; }

 private:
  std::string path(const std::string& key) const;
  void check_key(const std::string& key, const nlohmann::json& value) const;

  const nlohmann::json* object_;
  std::string section_;
  DeepSpeedFile* file_;
};

/// The text of a number, "1e-5" or a JSON number; none where it is no number.
std::optional<double> lenient_number(const nlohmann::json& value);

}  // namespace spillway
