// SPDX-License-Identifier: Apache-2.0
#include "formats/checksum.h"

#define XXH_INLINE_ALL  // compiled in here: nothing to link, nothing to install with the library
#include <xxhash.h>

#include "formats/mapped_file.h"

namespace spillway {

struct Checksum::State {
  XXH3_state_t xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}

Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}

std::uint64_t Checksum::value() const {
  return XXH3_64bits_digest(&state_->xxh);
}

std::uint64_t checksum_of_file(const std::filesystem::path& file) {
  const MappedFile mapped(file);
  Checksum sum;
  sum.add(mapped.bytes());
  return sum.value();
}

}  // namespace spillway
