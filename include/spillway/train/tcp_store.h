// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/comm/launch.h"
#include "spillway/comm/store.h"
#include "spillway/core/units.h"

namespace spillway {

/// LibTorch's store over TCP at the launch's address: rank 0 serves it, or the launcher does already (torchrun).
/// Blocks: until it answers. Throws: RankError after `timeout`; InvalidArgument naming MASTER_ADDR where ranks are on
/// several hosts and nothing says which is rank 0's.
std::unique_ptr<Store> make_tcp_store(const Launch& launch, Seconds timeout = {600});

}  // namespace spillway
