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

/// The longest header that the format's own library reads, so the longest that is written.
inline constexpr Bytes kSafetensorsHeaderLimit{100'000'000};

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
/// A file must not be changed while a reader is open on it (replacing it by renaming another into place is fine).
///
/// Everything a file says is checked before use: header length, JSON, types, shapes times sizes against offsets, order,
/// overlap, gaps, trailing bytes, duplicate names, shard names that leave the folder, names the index and the shards
/// disagree on. Another format's file (a pickle, GGUF, HDF5, an LFS pointer) is named as such. A tensor of a type that
/// Spillway does not compute with (8-bit floats, complex) is refused when it is read, not before.
/// Threads: safe to read from several.
/// Throws: FileError naming the file and what was expected.
class SafetensorsReader {
 public:
  /// `header_limit`: the longest header (and index) that is read; a longer one is refused with both sizes.
  explicit SafetensorsReader(const std::filesystem::path& file_or_folder, Bytes header_limit = kSafetensorsHeaderLimit);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  /// Tensor names in file order (shard by shard, the shards by name).
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
void convert_elements(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target,
                      std::int64_t count);

/// A tensor to be written. `fill` is called once, when the tensor's turn comes, with a buffer of exactly its bytes: so
/// a model is written with at most one tensor in memory beside it.
struct TensorSource {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::function<void(std::span<std::byte>)> fill;
};

/// What was written.
struct FileDigest {
  Bytes bytes;
  std::uint64_t checksum = 0;  // XXH3, 64 bits
};

/// Writes `tensors` to one safetensors file: aside first, flushed, then renamed into place, so that a reader never sees
/// half a file. Order: as given, wider elements first, so that each tensor starts at a multiple of its element.
/// Throws: FileError with file and errno text (nothing is left behind); InvalidArgument on duplicate names, an
/// impossible shape, text that is not UTF-8, or a header over kSafetensorsHeaderLimit (before anything is written).
FileDigest write_safetensors(const std::filesystem::path& file, std::span<const TensorSource> tensors,
                             const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

/// Writes a Hugging Face style set of files into `folder` (made if missing): `model.safetensors`, or shards of at most
/// `max_shard` bytes (a larger tensor gets a shard of its own) named model-00001-of-0000N.safetensors and their
/// `model.safetensors.index.json`. Weight files of an earlier save that are not part of this one are removed last.
/// Order: everything is complete on disk, under hidden names, before the first file takes its place. So a failure
/// leaves the earlier save as it was, and a reader that starts meanwhile finds one save or the other or no index. (One
/// that is opening shards at that very moment is not guarded against.) Throws: as write_safetensors.
void write_safetensors_folder(const std::filesystem::path& folder, std::span<const TensorSource> tensors,
                              Bytes max_shard, const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace spillway
