// SPDX-License-Identifier: Apache-2.0
#include "tools/inspect.h"

#include <array>
#include <string>

#include "fuzz/input_folder.h"
#include "fuzz/target_support.h"
#include "fuzz/targets.h"

namespace spillway::fuzz {

bool inspect(std::span<const std::byte> input) {
  struct Kind {
    const char* text;
    const char* weights;
  };
  static constexpr std::array<Kind, 3> kKinds{{{"config.json", "model.safetensors"},
                                               {"adapter_config.json", "adapter_model.safetensors"},
                                               {"manifest.json", "states-00001.safetensors"}}};
  static std::array<InputFolder, kKinds.size()> folders;
  if (input.empty()) return false;
  const auto first = std::to_integer<std::size_t>(input[0]);
  const Kind& kind = kKinds[first % kKinds.size()];
  InputFolder& folder = folders[first % kKinds.size()];
  input = input.subspan(1);
  folder.put(kind.weights, safetensors_file(take_last(input)));
  folder.put(kind.text, input);
  try {
    check_printable(tools::inspect(folder.path(), first >= 128));
    return true;
  } catch (const FileError& error) {
    return refused(error);
  } catch (const InvalidArgument& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
