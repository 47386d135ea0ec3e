// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/models/causal_lm.h"

namespace spillway::test {

/// The folder tests/golden/`name`.
std::filesystem::path fixture_folder(const std::string& name);
nlohmann::json read_json(const std::filesystem::path& file);

/// AdamW, groups and clipping as the folder's reference.json says.
Config fixture_config(const nlohmann::json& reference, const std::string& schedule);

/// What a run leaves of each step.
struct Curve {
  std::vector<double> losses, norms;
};

/// Trains `model` as PyTorch trained the fixture, `epochs` times through its rows. The model has its newest weights
/// afterwards.
Curve train_fixture(CausalLM& model, const std::string& name, const Config& config, std::int64_t epochs);

}  // namespace spillway::test
