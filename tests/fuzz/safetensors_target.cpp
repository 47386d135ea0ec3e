// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "fuzz/input_folder.h"
#include "fuzz/target_support.h"
#include "fuzz/targets.h"

namespace spillway::fuzz {

bool safetensors(std::span<const std::byte> input) {
  static InputFolder folder;
  const bool raw = input.size() < 3 || (input[0] & std::byte{1}) == std::byte{0};
  const auto made = raw ? std::vector<std::byte>() : safetensors_file(input.subspan(1));
  const auto content = raw ? input.subspan(std::min<std::size_t>(1, input.size())) : std::span<const std::byte>(made);
  try {
    read_all(SafetensorsReader(folder.put("input.safetensors", content)));
    return true;
  } catch (const FileError& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
