// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/core/dtype.h"
#include "spillway/core/units.h"

namespace spillway {

/// A folder of weights has the first, or several files of its kind and the second.
inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";

/// What a header says of one tensor. `begin` and `end` count from the first byte after the header.
struct TensorEntry {
  std::string name;
  std::string dtype_word;
  std::optional<DType> dtype;  // empty: a type of the format that Spillway does not compute with
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  std::size_t data_start = 0;
};

/// "F32", "BF16", ...: the format's words.
std::string_view safetensors_word(DType type);

/// Elements of `shape`, or empty where a dimension is negative or the elements times `element_size` pass 63 bits (even
/// if another dimension is zero).
std::optional<std::int64_t> checked_numel(std::span<const std::int64_t> shape, std::int64_t element_size);

/// The JSON of a header alone: names, types, shapes and offsets as they stand, with every key and type of value
/// checked. Throws: FileError naming `file`.
SafetensorsHeader read_header_json(const std::filesystem::path& file, std::string_view json);

/// A whole file's header, checked against itself and the file's size. Throws: FileError naming `file`.
SafetensorsHeader read_header(const std::filesystem::path& file, std::span<const std::byte> bytes, Bytes header_limit);

}  // namespace spillway
