// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <utility>

#include "spillway/comm/communicator.h"
#include "spillway/lane/lane.h"

namespace spillway {

/// What a network lane is given: an op that fails there, or cannot start, is told to the other ranks at once. They wait
/// for it, and this rank's host may be waiting for them before it learns of the failure.
inline LaneContext network_context(LaneContext context, Communicator& ranks) {
  context.failed = [&ranks](const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& exception) {
      ranks.fail(exception.what());
    } catch (...) {
      ranks.fail("an op of its network lane failed");
    }
  };
  return context;
}

}  // namespace spillway
