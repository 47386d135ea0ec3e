// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "spillway/state/checkpoint_folder.h"

namespace spillway {

inline constexpr const char* kManifestName = "manifest.json";

/// The manifest as read_checkpoint_manifest reads it. Throws: InvalidArgument for text that is not UTF-8.
std::string checkpoint_manifest_text(const CheckpointManifest& manifest);

}  // namespace spillway
