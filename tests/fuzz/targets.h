// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace spillway::fuzz {

/// Each target takes any bytes as an input file and uses all that comes of it. True where the file was accepted; a
/// refusal must be the documented exception: any other, and any fault of memory, ends the program.

/// Byte 0: even, the rest is a safetensors file; odd, bytes 1 and 2 count the data at the end, what stands before is
/// the header's text and its length is put in front (which a fuzzer would have to guess at each change).
bool safetensors(std::span<const std::byte> input);

/// Bytes 0 and 1, 2 and 3: the lengths of two shards at the end (the second first), each a header and data as above;
/// what stands before is the text of the index.
bool safetensors_index(std::span<const std::byte> input);

/// Bytes 0 and 1: the length of the states at the end, a header and data as above; before it the text of a manifest.
bool checkpoint(std::span<const std::byte> input);

/// `spillway inspect`. Byte 0: which kind of folder (model, adapters, checkpoint), above 127 with checksums. Then bytes
/// 1 and 2: the length of the weights at the end, a header and data as above; before it the text beside them.
bool inspect(std::span<const std::byte> input);

/// The text of a config.json.
bool model_config(std::span<const std::byte> input);

/// The text of a configuration, Spillway's own or DeepSpeed's.
bool config(std::span<const std::byte> input);

/// The text of an adapter_config.json, whose adapters are then those of a small Llama.
bool lora_options(std::span<const std::byte> input);

/// Byte 0: the kind of file (uint16, uint32, safetensors). Byte 1: the length of a row. Byte 2: the vocabulary.
bool token_file(std::span<const std::byte> input);

struct NamedTarget {
  const char* name;  // of its folder of seeds too
  bool (*run)(std::span<const std::byte> input);
};
inline constexpr std::array<NamedTarget, 8> kTargets{{{"checkpoint", checkpoint},
                                                      {"config", config},
                                                      {"inspect", inspect},
                                                      {"lora_options", lora_options},
                                                      {"model_config", model_config},
                                                      {"safetensors", safetensors},
                                                      {"safetensors_index", safetensors_index},
                                                      {"token_file", token_file}}};

}  // namespace spillway::fuzz
