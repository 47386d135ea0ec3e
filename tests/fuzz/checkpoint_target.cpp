// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "fuzz/input_folder.h"
#include "fuzz/target_support.h"
#include "fuzz/targets.h"
#include "spillway/state/checkpoint_folder.h"
#include "state/checkpoint_manifest.h"

namespace spillway::fuzz {
namespace {

void check_written_is_read(const CheckpointManifest& manifest) {
  static InputFolder again;
  const std::string text = checkpoint_manifest_text(manifest);
  again.put("manifest.json", std::as_bytes(std::span(text)));
  check(checkpoint_manifest_text(read_checkpoint_manifest(again.path())) == text, "what is written is read back");
}

}  // namespace

bool checkpoint(std::span<const std::byte> input) {
  static InputFolder folder;
  folder.put("states-00001.safetensors", safetensors_file(take_last(input)));
  folder.put("manifest.json", input);
  try {
    const CheckpointManifest manifest = read_checkpoint_manifest(folder.path());
    check_written_is_read(manifest);
    check_checkpoint_files(folder.path(), manifest, false);
    for (const CheckpointFile& file : manifest.files) read_all(SafetensorsReader(folder.path() / file.name));
    check_checkpoint_files(folder.path(), manifest, true);
    return true;
  } catch (const FileError& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
