// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "spillway/comm/communicator.h"

namespace spillway {

/// A world of one rank. Takes streams too: copies go to the stream they are given.
std::unique_ptr<Communicator> make_one_rank();

/// Ranks that are threads of this process: one communicator each. Throws: InvalidArgument below one.
std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int size, CommOptions options = {});

}  // namespace spillway
