// SPDX-License-Identifier: Apache-2.0
//
// What can be known about data and prompt before training.
#include <cstdint>
#include <string>
#include <vector>

#include "finetune.h"
#include "spillway/core/error.h"
#include "spillway/formats/token_file.h"

namespace finetune {

void check_tokens(const spillway::TokenFile& data, std::int64_t vocabulary) {
  std::vector<std::int64_t> inputs(static_cast<std::size_t>(data.length())), targets(inputs.size());
  for (std::int64_t row = 0; row < data.rows(); ++row) data.read(row, vocabulary, inputs, targets);
}

void check_prompt(const Options& o, std::int64_t vocabulary) {
  spillway::require(o.prompt.empty() || vocabulary <= 256,
                    "--prompt is bytes: it needs a model with a vocabulary of 256");
  for (const char c : o.prompt) {
    const auto byte = static_cast<unsigned char>(c);
    spillway::require(byte < vocabulary, "--prompt has the byte " + std::to_string(byte) +
                                             ", but the model's vocabulary ends before " + std::to_string(vocabulary));
  }
}

}  // namespace finetune
