// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace spillway {

/// Named values that the ranks of a run share beside a communicator, and before there is one.
/// Threads: safe. Throws: RankError where it does not answer.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, std::span<const std::byte> value) = 0;
  /// Empty where no rank has set it.
  virtual std::optional<std::vector<std::byte>> find(const std::string& key) = 0;
  virtual void erase(const std::string& key) = 0;
};

}  // namespace spillway
