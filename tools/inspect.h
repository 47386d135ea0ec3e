// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>

namespace spillway::tools {

/// What a folder holds, for people: a Hugging Face model, PEFT adapters, a checkpoint, or a folder of checkpoints.
/// `checksums`: reads all of a checkpoint's files. Throws: FileError or InvalidArgument saying what is wrong with it,
/// or what was looked for where it is none of these.
std::string inspect(const std::filesystem::path& folder, bool checksums);

}  // namespace spillway::tools
