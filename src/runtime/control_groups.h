// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace spillway {

/// Folders of the control groups that limit this process in `controller` ("cpu", "memory"), of both versions: its own
/// groups and those that they stand in, up to the top of each mount below `root`. Some of the folders may not exist:
/// a container need not see the groups that it is named after.
std::vector<std::filesystem::path> control_groups(const std::filesystem::path& root, std::string_view controller);

}  // namespace spillway
