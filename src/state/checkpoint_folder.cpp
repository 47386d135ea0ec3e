// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/checkpoint_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "formats/atomic_file.h"
#include "formats/checksum.h"
#include "formats/process_names.h"
#include "spillway/core/error.h"
#include "state/checkpoint_manifest.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kAside = ".saving-";  // then process_name()
constexpr unsigned kExchange = 2;                // RENAME_EXCHANGE: two names swap what they stand for, at once

std::optional<std::int64_t> number_after(std::string_view name, std::string_view prefix) {
  if (name.substr(0, prefix.size()) != prefix) return std::nullopt;
  name.remove_prefix(prefix.size());
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end == name.data() || number < 0) return std::nullopt;
  return end == name.data() + name.size() || *end == '-' ? std::optional(number) : std::nullopt;
}

std::optional<std::int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return name.find('-', kPrefix.size()) == std::string::npos ? number_after(name, kPrefix) : std::nullopt;
}

template <class Visit>
void for_entries(const fs::path& root, const Visit& visit) {
  std::error_code error;
  if (!fs::exists(root, error)) return;
  for (fs::directory_iterator at(root, error), end; !error && at != end; at.increment(error)) visit(at->path());
  if (error) throw FileError(fmt::format("{}: cannot list this folder: {}", root.string(), error.message()));
}

void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) throw FileError(fmt::format("{}: cannot remove it: {}", folder.string(), error.message()));
}

std::string aside_name() {
  return fmt::format("{}{}", kAside, process_name());
}

// What saves of processes that are gone left behind. A process number that is in use again keeps its leftovers until
// the next save after it ends.
void remove_unfinished(const fs::path& root) {
  std::vector<fs::path> left;
  for_entries(root, [&](const fs::path& entry) {
    const std::string name = entry.filename().string();
    if (name.starts_with(kAside) && is_left_behind(std::string_view(name).substr(kAside.size()))) left.push_back(entry);
  });
  for (const fs::path& folder : left) remove_folder(folder);
}

void rename_folder(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return;
  throw FileError(fmt::format("{}: cannot rename into place: {}", to.string(), std::strerror(errno)));
}

// Gives `aside` the name `target`; what had it before is left under the name of `aside`.
void take_name(const fs::path& aside, const fs::path& target) {
  if (!fs::exists(target)) return rename_folder(aside, target);
  if (::syscall(SYS_renameat2, AT_FDCWD, aside.c_str(), AT_FDCWD, target.c_str(), kExchange) == 0) return;
  const fs::path old = target.parent_path() / aside_name();  // a file system that cannot exchange
  rename_folder(target, old);
  try {
    rename_folder(aside, target);
  } catch (...) {
    rename_folder(old, target);
    throw;
  }
  rename_folder(old, aside);
}

}  // namespace

std::vector<fs::path> list_checkpoints(const fs::path& root) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  for_entries(root, [&](const fs::path& entry) {
    const auto step = step_of(entry);
    std::error_code unreadable;
    // Other things of such a name are none: a save makes the whole folder appear at once.
    if (step && fs::exists(entry / kManifestName, unreadable)) found.emplace_back(*step, entry);
  });
  std::sort(found.begin(), found.end());
  std::vector<fs::path> out;
  for (auto& [step, folder] : found) out.push_back(std::move(folder));
  return out;
}

void check_checkpoint_files(const fs::path& folder, const CheckpointManifest& manifest, bool checksums) {
  for (const CheckpointFile& file : manifest.files) {
    const fs::path path = folder / file.name;
    std::error_code error;
    const std::uintmax_t size = fs::file_size(path, error);
    if (error) throw FileError(fmt::format("{}: this part of the checkpoint is missing", path.string()));
    if (size != static_cast<std::uintmax_t>(file.bytes.value)) {
      throw FileError(fmt::format("{}: {} bytes long, but {} were written", path.string(), size, file.bytes.value));
    }
    if (checksums && checksum_of_file(path) != file.checksum) {
      throw FileError(
          fmt::format("{}: its checksum is another one than when it was written: the file is damaged; an "
                      "earlier checkpoint may be whole: move this one away to go on from that",
                      path.string()));
    }
  }
}

CheckpointWriter::CheckpointWriter(const fs::path& root, std::int64_t step) : root_(root), step_(step) {
  std::error_code error;
  fs::create_directories(root_, error);
  if (error) throw FileError(fmt::format("{}: cannot make this folder: {}", root_.string(), error.message()));
  remove_unfinished(root_);
  const fs::path aside = root_ / aside_name();
  if (!fs::create_directory(aside, error) && !error) error = std::make_error_code(std::errc::file_exists);
  if (error) throw FileError(fmt::format("{}: cannot make a folder in it: {}", root_.string(), error.message()));
  aside_ = aside;
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  if (!aside_.empty()) fs::remove_all(aside_, ignored);
}

CheckpointFile write_checkpoint_part(const fs::path& aside, const std::string& name,
                                     std::span<const TensorSource> tensors) {
  const FileDigest written = write_safetensors(aside / name, tensors, {{"format", "spillway-checkpoint"}});
  return {name, written.bytes, written.checksum};
}

void CheckpointWriter::add_file(const std::string& name, std::span<const TensorSource> tensors) {
  files_.push_back(write_checkpoint_part(aside_, name, tensors));
}

void CheckpointWriter::add_part(CheckpointFile part) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(aside_ / part.name, error);
  if (error || size != static_cast<std::uintmax_t>(part.bytes.value)) {
    throw FileError(fmt::format(
        "{}: another rank wrote {} bytes of this part, but {}: all ranks have to save into one "
        "file system",
        (aside_ / part.name).string(), part.bytes.value, error ? "it is not there" : fmt::format("it has {}", size)));
  }
  files_.push_back(std::move(part));
}

fs::path CheckpointWriter::commit(CheckpointManifest manifest) {
  manifest.step = step_;
  manifest.files = files_;
  const std::string text = checkpoint_manifest_text(manifest);
  AtomicFile file(aside_ / kManifestName);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
  file.publish();
  flush_folder(aside_);
  fs::path target = root_ / fmt::format("{}{:08}", kPrefix, step_);
  take_name(aside_, target);
  flush_folder(root_);
  if (fs::exists(aside_)) remove_folder(aside_);  // an earlier checkpoint of this step
  aside_.clear();
  return target;
}

void prune_checkpoints(const fs::path& root, const fs::path& newest, std::int64_t keep) {
  require(keep >= 1, fmt::format("{} checkpoints were asked to be kept; expected at least 1", keep));
  std::vector<fs::path> others = list_checkpoints(root);
  std::erase_if(others, [&](const fs::path& folder) { return folder.filename() == newest.filename(); });
  if (static_cast<std::int64_t>(others.size()) <= keep - 1) return;
  others.resize(others.size() - static_cast<std::size_t>(keep - 1));
  for (const fs::path& folder : others) {
    // First out of sight, so that half a folder is never taken for a checkpoint.
    const fs::path aside = root / aside_name();
    rename_folder(folder, aside);
    remove_folder(aside);
  }
}

}  // namespace spillway
