// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "fuzz/input_folder.h"
#include "fuzz/target_support.h"
#include "fuzz/targets.h"

namespace spillway::fuzz {

bool safetensors_index(std::span<const std::byte> input) {
  static InputFolder folder;
  for (const char* shard : {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    const auto piece = take_last(input);
    if (piece.empty()) {
      folder.remove(shard);
    } else {
      folder.put(shard, safetensors_file(piece));
    }
  }
  folder.put("model.safetensors.index.json", input);
  try {
    read_all(SafetensorsReader(folder.path()));
    return true;
  } catch (const FileError& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
