// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "fuzz/input_file.h"
#include "fuzz/targets.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"

namespace spillway::fuzz {
namespace {

// Keeps the compiler from leaving out the reads of a view.
volatile unsigned sink = 0;

void use(const SafetensorsReader& reader) {
  for (const std::string& name : reader.names()) {
    try {
      const TensorView view = reader.tensor(name);
      check(view.numel() * size_of(view.dtype) == static_cast<std::int64_t>(view.bytes.size()),
            "a view holds its shape");
      unsigned sum = 0;
      for (const std::byte byte : view.bytes) sum += std::to_integer<unsigned>(byte);
      sink = sink + sum;
    } catch (const FileError&) {
      // A type that is not computed with.
    }
  }
}

std::vector<std::byte> with_length(std::span<const std::byte> input) {
  const std::size_t wanted = std::to_integer<std::size_t>(input[0]) + 256 * std::to_integer<std::size_t>(input[1]);
  input = input.subspan(2);
  const std::size_t header = input.size() - std::min(wanted, input.size());
  std::vector<std::byte> file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<std::byte>(header >> (8 * i)));
  file.insert(file.end(), input.begin(), input.end());
  return file;
}

}  // namespace

bool safetensors(std::span<const std::byte> input) {
  static InputFile file("input.safetensors");
  const bool raw = input.size() < 3 || (input[0] & std::byte{1}) == std::byte{0};
  const auto made = raw ? std::vector<std::byte>() : with_length(input.subspan(1));
  const auto content = raw ? input.subspan(std::min<std::size_t>(1, input.size())) : std::span<const std::byte>(made);
  try {
    use(SafetensorsReader(file.fill(content)));
    return true;
  } catch (const FileError&) {
    return false;
  }
}

}  // namespace spillway::fuzz
