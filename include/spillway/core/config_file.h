// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/config.h"

namespace spillway {

/// Where values come from: key of Spillway's own JSON ("optimizer.lr") to a place for people. Keys that are missing
/// have their defaults.
using ConfigOrigins = std::map<std::string, std::string>;

/// A configuration and what its file said beside it.
struct LoadedConfig {
  Config config;
  std::optional<std::int64_t> micro_batch = std::nullopt;  // rows of all ranks; DeepSpeed's files only
  /// What DeepSpeed's grad_accum_dtype says: fp32, or the working type, also where the program sets that afterwards.
  std::optional<DType> sum_type = std::nullopt;
  std::vector<std::string> warnings;  // what the file says without effect here
  ConfigOrigins origins;
};

/// Reads Spillway's own JSON or a DeepSpeed configuration, whichever it is (docs/configuration.md has every key of
/// both). Comments (//, /* */, #) and commas before a closing bracket are skipped. A learning-rate schedule whose end
/// is "auto" comes back with total_steps 0, for the program to set before it validates.
/// `ranks`: what DeepSpeed's sizes of batches multiply with. Throws: InvalidArgument naming the key.
LoadedConfig parse_config(const std::string& json, const std::string& source, int ranks = 1);
/// Throws: FileError when the file cannot be read; else as parse_config.
LoadedConfig load_config(const std::filesystem::path& file, int ranks = 1);

/// The configuration as Spillway's own JSON, every key with its value and, as a comment, where that came from.
/// parse_config reads it back.
std::string to_json(const Config& config, const ConfigOrigins& origins);

}  // namespace spillway
