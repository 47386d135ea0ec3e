// SPDX-License-Identifier: Apache-2.0
#pragma once

// What every transport must do, as bodies that each rank runs. A body throws std::runtime_error for a wrong result, so
// that ranks of any kind report it in one way.

#include <functional>
#include <string>
#include <vector>

#include "spillway/comm/communicator.h"

namespace spillway::test {

struct VerbCase {
  std::string name;
  std::function<void(Communicator&)> body;
};

std::vector<VerbCase> verb_cases();

}  // namespace spillway::test
