// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/core/dtype.h"
#include "spillway/core/units.h"

namespace spillway {

/// One tensor of a safetensors file or folder: where its bytes are mapped and what they mean.
/// Owns: nothing; valid as long as the reader it came from.
struct TensorView {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, little-endian, not necessarily aligned to the element

  std::int64_t numel() const;
};

/// Reads tensors by name from one safetensors file, or from a folder: `model.safetensors`, or the shards named by
/// `model.safetensors.index.json`. Files are memory-mapped, so tensors that are not read cost nothing.
///
/// Everything a file says is checked before use: header length, JSON, types, shapes times sizes against offsets, order,
/// overlap, gaps, trailing bytes, duplicate names, shard names that leave the folder, names the index and the shards
/// disagree on. Another format's file (a pickle, GGUF, HDF5, an LFS pointer) is named as such.
/// Threads: safe to read from several.
/// Throws: FileError naming the file and what was expected.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& file_or_folder);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  /// Tensor names in file order (shard by shard).
  const std::vector<std::string>& names() const;
  bool contains(const std::string& name) const;

  /// Throws: FileError naming the tensor and the nearest name there is.
  TensorView tensor(const std::string& name) const;

  /// The `__metadata__` of the (first) file.
  const std::map<std::string, std::string>& metadata() const;

  /// The file or folder this was opened on, for messages.
  const std::filesystem::path& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Converts between f32, bf16 and f16 element types (equal types are copied).
/// Rounds to nearest even; NaN stays NaN; f16 overflows to infinity. The two ranges must not overlap.
/// Throws: InvalidArgument where a type is not a floating type or a size does not match `count`.
void convert_elements(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target, std::int64_t count);

/// A tensor to be written. `fill` is called once, when the tensor's turn comes, with a buffer of exactly its bytes: so a
/// model is written with at most one tensor in memory beside it.
struct TensorSource {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::function<void(std::span<std::byte>)> fill;
};

/// Writes `tensors` in their order to one safetensors file: aside first, flushed, then renamed into place, so that a
/// reader never sees half a file. Throws: FileError with file and errno text (nothing is left behind);
/// InvalidArgument on duplicate names.
void write_safetensors(const std::filesystem::path& file, std::span<const TensorSource> tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

/// Writes a Hugging Face style set of files into `folder` (made if missing): `model.safetensors`, or shards of at most
/// `max_shard` bytes (a larger tensor gets a shard of its own) named model-00001-of-0000N.safetensors and their
/// `model.safetensors.index.json`. Weight files of an earlier save that are not part of this one are removed at the end.
void write_safetensors_folder(const std::filesystem::path& folder, std::span<const TensorSource> tensors, Bytes max_shard,
                              const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace spillway
