// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "spillway/core/config.h"

namespace spillway {

/// Reads a document of Spillway's own keys; what they say is not validated. Throws: as Config::parse.
Config read_own_config(const nlohmann::json& document, const std::string& source);

/// Throws: FileError when the file cannot be read.
std::string read_config_file(const std::filesystem::path& file);

/// The keys that such a document may have at its top.
const std::vector<std::string>& own_top_keys();

}  // namespace spillway
