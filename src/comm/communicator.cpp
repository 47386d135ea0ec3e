// SPDX-License-Identifier: Apache-2.0
#include "spillway/comm/communicator.h"

#include <cstring>

namespace spillway {

bool Communicator::all_equal(CommCall call, std::span<const std::byte> mine, CommOrder order) {
  const std::vector<std::byte> all = gather_bytes(call, mine, order);
  for (std::size_t at = 0; at < all.size(); at += mine.size()) {
    if (std::memcmp(all.data() + at, mine.data(), mine.size()) != 0) return false;
  }
  return true;
}

void Communicator::sum(CommCall call, std::span<std::int64_t> values, CommOrder order) {
  const std::vector<std::byte> all = gather_bytes(call, std::as_bytes(values), order);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint64_t total = 0;  // wraps, where a signed sum may not
    for (std::size_t at = i * sizeof(total); at < all.size(); at += values.size_bytes()) {
      std::uint64_t value = 0;
      std::memcpy(&value, all.data() + at, sizeof(value));
      total += value;
    }
    values[i] = static_cast<std::int64_t>(total);
  }
}

bool Communicator::any(CommCall call, bool mine, CommOrder order) {
  const auto byte = static_cast<std::byte>(mine ? 1 : 0);
  const std::vector<std::byte> all = gather_bytes(call, {&byte, 1}, order);
  return std::any_of(all.begin(), all.end(), [](std::byte each) { return each != std::byte{0}; });
}

}  // namespace spillway
