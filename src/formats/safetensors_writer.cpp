// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "formats/atomic_file.h"
#include "formats/safetensors_header.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using Metadata = std::map<std::string, std::string>;
using Tensors = std::vector<const TensorSource*>;

// What a tensor takes in a header beside its name and shape: keys, quotes, type and two offsets of up to 19 digits.
constexpr std::int64_t kEntryOverhead = 100;
constexpr std::int64_t kDimensionDigits = 20;

std::int64_t bytes_of(const TensorSource& tensor) {
  const auto numel = checked_numel(tensor.shape, size_of(tensor.dtype));
  require(numel.has_value(), fmt::format("tensor \"{}\": shape [{}] is negative or passes 63 bits", tensor.name,
                                         fmt::join(tensor.shape, ", ")));
  return *numel * size_of(tensor.dtype);
}

void check_names(std::span<const TensorSource> tensors) {
  std::unordered_set<std::string_view> names;
  for (const TensorSource& tensor : tensors) {
    require(tensor.name != "__metadata__", "\"__metadata__\" cannot be a tensor's name: the format uses it itself");
    require(names.insert(tensor.name).second, fmt::format("two tensors are named \"{}\"", tensor.name));
    require(tensor.fill != nullptr, fmt::format("tensor \"{}\" has no function to fill it", tensor.name));
  }
}

// The order of a file: as given, but wider elements first, so that every tensor starts at a multiple of its element
// (readers of other libraries view the bytes in place and need that).
Tensors file_order(Tensors tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorSource* a, const TensorSource* b) { return size_of(a->dtype) > size_of(b->dtype); });
  return tensors;
}

// An upper bound of what a tensor adds to a header, known before the header is built.
std::int64_t entry_bound(const TensorSource& tensor) {
  constexpr std::int64_t kEscaped = 6;  // \u00XX, the longest form of one byte of a name
  return static_cast<std::int64_t>(tensor.name.size()) * kEscaped + kEntryOverhead +
         kDimensionDigits * static_cast<std::int64_t>(tensor.shape.size());
}

std::string header_text(const Tensors& order, const Metadata& metadata) {
  std::int64_t at = 0;
  std::string text = "{";
  // The entries are joined by hand: an ordered_json of a million keys looks each one up by a linear search.
  try {
    if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump();
    for (const TensorSource* tensor : order) {
      const std::int64_t end = at + bytes_of(*tensor);
      text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                          text.size() > 1 ? "," : "", nlohmann::json(tensor->name).dump(),
                          safetensors_word(tensor->dtype), fmt::join(tensor->shape, ","), at, end);
      at = end;
    }
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(fmt::format("a tensor's name or the metadata is not UTF-8 text: {}", error.what()));
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

void check_header(const fs::path& file, std::size_t size) {
  if (static_cast<std::int64_t>(size) <= kSafetensorsHeaderLimit.value) return;
  throw InvalidArgument(fmt::format(
      "{}: the header would take {} bytes, over the {} that readers of the format accept; {}", file.string(), size,
      kSafetensorsHeaderLimit.value, "write fewer tensors to a file (write_safetensors_folder splits them)"));
}

AtomicFile write_aside(const fs::path& file, const Tensors& order, const Metadata& metadata) {
  const std::string header = header_text(order, metadata);
  check_header(file, header.size());
  AtomicFile out(file);
  std::array<std::byte, 8> length{};
  for (std::size_t i = 0; i < length.size(); ++i) length[i] = static_cast<std::byte>(header.size() >> (8 * i));
  out.write(length);
  out.write(std::as_bytes(std::span(header)));
  for (const TensorSource* tensor : order) {
    const auto size = static_cast<std::size_t>(bytes_of(*tensor));
    const auto buffer = std::make_unique_for_overwrite<std::byte[]>(size);
    tensor->fill({buffer.get(), size});
    out.write({buffer.get(), size});
  }
  out.finish();
  return out;
}

// Cuts `tensors`, in their order, into shards of at most `most` bytes and of headers within the format's limit.
std::vector<Tensors> cut_into_shards(std::span<const TensorSource> tensors, Bytes most, const Metadata& metadata) {
  std::int64_t metadata_bound = kEntryOverhead;
  for (const auto& [key, value] : metadata) {
    metadata_bound += 6 * static_cast<std::int64_t>(key.size() + value.size()) + kEntryOverhead;
  }
  std::vector<Tensors> shards(1);
  std::int64_t bytes = 0;
  std::int64_t header = metadata_bound;
  for (const TensorSource& tensor : tensors) {
    const std::int64_t more = bytes_of(tensor);
    const bool full = more > most.value - bytes || header + entry_bound(tensor) > kSafetensorsHeaderLimit.value;
    if (full && !shards.back().empty()) {
      shards.emplace_back();
      bytes = 0;
      header = metadata_bound;
    }
    shards.back().push_back(&tensor);
    bytes += more;
    header += entry_bound(tensor);
  }
  return shards;
}

AtomicFile write_index_aside(const fs::path& folder, const std::vector<Tensors>& shards,
                             const std::vector<AtomicFile>& files) {
  nlohmann::json map = nlohmann::json::object();
  std::int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const TensorSource* tensor : shards[i]) {
      map[tensor->name] = files[i].target().filename().string();
      total += bytes_of(*tensor);
    }
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}};
  const std::string text = index.dump(2) + "\n";
  AtomicFile out(folder / kIndexFile);
  out.write(std::as_bytes(std::span(text)));
  out.finish();
  return out;
}

// model.safetensors, its index, and model-00001-of-00002.safetensors: the names that a save of weights uses.
bool is_weight_file(const std::string& name) {
  if (name == kWeightsFile || name == kIndexFile) return true;
  constexpr std::string_view kShape = "model-#####-of-#####.safetensors";
  return name.size() == kShape.size() && std::equal(name.begin(), name.end(), kShape.begin(), [](char c, char shape) {
           return shape == '#' ? std::isdigit(static_cast<unsigned char>(c)) != 0 : c == shape;
         });
}

void remove_file(const fs::path& file) {
  std::error_code error;
  fs::remove(file, error);
  if (error) throw FileError(fmt::format("{}: cannot remove it: {}", file.string(), error.message()));
}

void remove_other_weights(const fs::path& folder, const std::set<std::string>& kept) {
  std::vector<fs::path> old;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const auto& entry = *at;
    const std::string name = entry.path().filename().string();
    if (is_weight_file(name) && !kept.contains(name)) old.push_back(entry.path());
  }
  if (error) throw FileError(fmt::format("{}: cannot list this folder: {}", folder.string(), error.message()));
  for (const fs::path& file : old) remove_file(file);
}

// Every file is complete under its hidden name before the first one is published, so that running out of space leaves
// an earlier save as it was. The old index goes first and the new one comes last: a reader that arrives in between, or
// after a crash in between, finds the old single file or no weights at all, never shards of two saves.
void publish_all(const fs::path& folder, std::vector<AtomicFile>& files) {
  std::set<std::string> kept;
  if (files.size() > 1) remove_file(folder / kIndexFile);
  for (AtomicFile& file : files) {
    file.publish();
    kept.insert(file.target().filename().string());
  }
  remove_other_weights(folder, kept);
}

}  // namespace

FileDigest write_safetensors(const fs::path& file, std::span<const TensorSource> tensors, const Metadata& metadata) {
  check_names(tensors);
  Tensors all;
  for (const TensorSource& tensor : tensors) all.push_back(&tensor);
  AtomicFile written = write_aside(file, file_order(std::move(all)), metadata);
  written.publish();
  return {written.size(), written.checksum()};
}

void write_safetensors_folder(const fs::path& folder, std::span<const TensorSource> tensors, Bytes max_shard,
                              const Metadata& metadata) {
  check_names(tensors);
  require(max_shard.value > 0, fmt::format("max_shard is {} bytes: it must be above zero", max_shard.value));
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw FileError(fmt::format("{}: cannot make this folder: {}", folder.string(), error.message()));

  const std::vector<Tensors> shards = cut_into_shards(tensors, max_shard, metadata);
  require(shards.size() <= 99999, fmt::format("max_shard of {} bytes makes {} shards: at most 99999 can be named",
                                              max_shard.value, shards.size()));
  std::vector<AtomicFile> files;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        shards.size() == 1 ? kWeightsFile : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    files.push_back(write_aside(folder / name, file_order(shards[i]), metadata));
  }
  if (shards.size() > 1) files.push_back(write_index_aside(folder, shards, files));
  publish_all(folder, files);
}

}  // namespace spillway
