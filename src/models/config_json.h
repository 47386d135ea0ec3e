// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "spillway/core/dtype.h"
#include "spillway/state/model_config.h"

namespace spillway {

/// The text of a config.json that says `config`: ModelConfig::parse and transformers read the same model from it.
std::string config_json(const ModelConfig& config, DType dtype);

/// `source` with its element type replaced (added where there was none); everything else stays, in its order.
std::string config_json_with_dtype(const std::string& source, DType dtype);

}  // namespace spillway
