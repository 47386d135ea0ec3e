// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

namespace spillway {

/// Pauses between looks at something that others will do: gives the core away at once, and after a while sleeps. Ranks
/// may be more than cores, and the optimizer needs these.
class Patience {
 public:
  void pause() {
    if (++looks_ < 100) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(looks_ < 1000 ? 20 : 200));
  }

 private:
  int looks_ = 0;
};

}  // namespace spillway
