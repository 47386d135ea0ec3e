// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace spillway {

/// A name that no other process gives out, on this host or another that saves to the same file system, nor this one a
/// second time: "HOST-PROCESS-RUN-NUMBER". A process number may come again, in a container always: RUN is drawn when a
/// process starts.
std::string process_name();

/// Whether the name is one that process_name() gave out on this host in a process that is gone. One whose process
/// number is in use by another program is not known to be.
bool is_left_behind(std::string_view name);

}  // namespace spillway
