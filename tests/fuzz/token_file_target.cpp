// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <vector>

#include "fuzz/input_folder.h"
#include "fuzz/target_support.h"
#include "fuzz/targets.h"
#include "spillway/formats/token_file.h"

namespace spillway::fuzz {
namespace {

void use(const TokenFile& file, std::int64_t vocabulary) {
  constexpr std::int64_t kFew = 100;
  std::vector<std::int64_t> inputs(static_cast<std::size_t>(file.length()));
  std::vector<std::int64_t> targets(inputs.size());
  for (std::int64_t row = 0; row < file.rows(); row += 1 + file.rows() / kFew) {
    try {
      file.read(row, vocabulary, inputs, targets);
    } catch (const FileError& error) {
      refused(error);
      continue;  // a token outside the vocabulary
    }
    for (const std::int64_t token : inputs) check(token >= 0 && token < vocabulary, "an input is in the vocabulary");
    for (const std::int64_t token : targets)
      check(token == -100 || (token >= 0 && token < vocabulary), "a target is in the vocabulary, or none");
    if (!file.has_documents()) continue;
    file.read_documents(row, inputs);  // checked by read
    for (const std::int64_t document : inputs) check(document >= -1, "a document is a number or padding");
  }
}

}  // namespace

bool token_file(std::span<const std::byte> input) {
  static InputFolder folder;
  static constexpr std::array kNames{"input.bin", "input.u32.bin", "input.safetensors"};
  if (input.size() < 3) return false;
  const char* name = kNames[std::to_integer<std::size_t>(input[0]) % kNames.size()];
  const auto length = std::to_integer<std::int64_t>(input[1]);
  const std::int64_t vocabulary = 1 + std::to_integer<std::int64_t>(input[2]);
  try {
    use(TokenFile(folder.put(name, input.subspan(3)), length), vocabulary);
    return true;
  } catch (const FileError& error) {
    return refused(error);
  } catch (const InvalidArgument& error) {
    return refused(error);  // a length of zero
  }
}

}  // namespace spillway::fuzz
