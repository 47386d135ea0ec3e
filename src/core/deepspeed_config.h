// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "spillway/core/config_file.h"

namespace spillway {

/// Reads a DeepSpeed configuration: what its keys mean here (docs/configuration.md has the table). Where a default of
/// DeepSpeed's differs from Spillway's, the former holds. Throws: as parse_config.
LoadedConfig read_deepspeed_config(const nlohmann::json& document, const std::string& source, int ranks);

}  // namespace spillway
