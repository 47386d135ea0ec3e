// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/core/units.h"
#include "spillway/formats/safetensors.h"
#include "spillway/state/loss_scaler.h"

namespace spillway {

/// A file of a checkpoint, as its manifest promises it.
struct CheckpointFile {
  std::string name;  // in the checkpoint's folder
  Bytes bytes;
  std::uint64_t checksum = 0;  // XXH3, 64 bits
};

struct CheckpointParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t updates = 0;
};

/// A parameter that is not trained: not stored, but known again.
struct FrozenParameter {
  std::string name;
  std::uint64_t checksum = 0;  // XXH3 of its bytes in the working type
};

/// What a checkpoint holds beside tensors. Nothing in it depends on placement, chunk size, threads or working type.
struct CheckpointManifest {
  std::int64_t step = 0;  // updates done
  std::int64_t skipped = 0, not_finite = 0;
  double first_weight = 0;  // W0
  std::string optimizer;
  DType precision = DType::f32;           // of the run that wrote it: any other may resume it
  std::vector<Hyperparameters> groups;    // before the learning-rate schedule
  std::optional<LossScalerState> scaler;  // of fp16 runs
  std::vector<CheckpointParameter> parameters;
  std::vector<FrozenParameter> frozen;
  std::vector<CheckpointFile> files;
  std::string program;  // what the program gave to be kept, untouched
};

/// Reads `folder`/manifest.json. Throws: FileError naming the file and what was expected (missing, another format, a
/// newer version, a file name that is not a plain one, a number out of range).
CheckpointManifest read_checkpoint_manifest(const std::filesystem::path& folder);

/// Throws: FileError naming the first file that is missing, of another length, or (with `checksums`, which reads
/// everything) damaged.
void check_checkpoint_files(const std::filesystem::path& folder, const CheckpointManifest& manifest, bool checksums);

/// The checkpoints in `root` by step, the oldest first: folders named step-N that a save finished. Leftovers of saves
/// that were cut short have other names. An empty list where `root` does not exist.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& root);

/// Writes one checkpoint: aside first, in a hidden folder of `root`; commit() gives it its name, step-N, by one rename
/// after everything was flushed. Until then an earlier checkpoint is what there is, whatever happens.
/// Owns: the folder aside, which its destructor removes unless it was committed.
class CheckpointWriter {
 public:
  /// Makes `root` where missing and removes what saves of processes that are gone left behind. Throws: FileError.
  CheckpointWriter(const std::filesystem::path& root, std::int64_t step);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Writes a safetensors file, one tensor in memory at a time. Throws: FileError.
  void add_file(const std::string& name, std::span<const TensorSource> tensors);
  /// Where other processes write their parts of this checkpoint (write_checkpoint_part), before commit().
  const std::filesystem::path& aside() const { return aside_; }
  /// Such a part. Throws: FileError where it is not there, or of another length.
  void add_part(CheckpointFile part);
  /// Completes it; `manifest.files` are filled in. A checkpoint of the same step is replaced. Returns its folder.
  std::filesystem::path commit(CheckpointManifest manifest);

 private:
  const std::filesystem::path root_;
  const std::int64_t step_;
  std::filesystem::path aside_;
  std::vector<CheckpointFile> files_;
};

/// Writes a part of a checkpoint into the folder `aside` of the process that commits it. Throws: FileError.
CheckpointFile write_checkpoint_part(const std::filesystem::path& aside, const std::string& name,
                                     std::span<const TensorSource> tensors);

/// Removes checkpoints of `root` but for `newest`, which was just made, and those of the `keep` - 1 highest steps
/// beside it. Throws: FileError.
void prune_checkpoints(const std::filesystem::path& root, const std::filesystem::path& newest, std::int64_t keep);

}  // namespace spillway
