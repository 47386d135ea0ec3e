// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <set>
#include <unordered_map>
#include <utility>

#include "core/strict_json.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_header.h"
#include "spillway/core/error.h"
#include "spillway/core/nearest.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

struct Index {
  fs::path file;
  std::map<std::string, std::set<std::string>> shards;  // shard file name -> tensor names
};

// A shard is a file of the index's own folder: anything else could make a download read files of its choice.
void check_shard_name(const fs::path& index, const std::string& name) {
  const bool plain = name.find_first_of("/\\") == std::string::npos && name.find('\0') == std::string::npos;
  if (!plain || name.empty() || name == "." || name == ".." || !name.ends_with(".safetensors")) {
    throw FileError(fmt::format("{}: {} is not a shard's name: expected a *.safetensors file of the same folder",
                                index.string(), in_quotes(name)));
  }
}

Index read_index(const fs::path& file, Bytes limit) {
  const MappedFile mapped(file);
  const auto bytes = mapped.bytes();
  if (bytes.size() > static_cast<std::size_t>(limit.value)) {
    throw FileError(fmt::format("{}: it has {} bytes, over the limit of {} for an index", file.string(), bytes.size(),
                                limit.value));
  }
  Index index{file, {}};
  try {
    const auto json = parse_strict_object({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    const auto map = json.find("weight_map");
    if (map == json.end() || !map->is_object()) throw JsonFault("it has no \"weight_map\" object");
    for (const auto& [tensor, shard] : map->items()) {
      if (!shard.is_string()) throw JsonFault(fmt::format("the shard of {} is not a string", in_quotes(tensor)));
      check_shard_name(file, shard.get_ref<const std::string&>());
      index.shards[shard.get<std::string>()].insert(tensor);
    }
  } catch (const JsonFault& fault) {
    throw FileError(fmt::format("{}: not a safetensors index: {}", file.string(), fault.what()));
  }
  if (index.shards.empty()) throw FileError(fmt::format("{}: its weight_map is empty", file.string()));
  return index;
}

bool is_there(const fs::path& file) {
  std::error_code ignored;
  return fs::exists(file, ignored);
}

// What a folder without safetensors weights does hold, as a hint.
std::string other_weights(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    for (const char* suffix : {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}) {
      if (name.ends_with(suffix)) {
        return fmt::format("; found {}: convert the model to safetensors first (save_pretrained does)", name);
      }
    }
    if (name.ends_with(".safetensors")) return fmt::format("; found {}: open that file by its own name", name);
  }
  return "";
}

}  // namespace

struct SafetensorsReader::Impl {
  struct Shard {
    MappedFile file;
    SafetensorsHeader header;
  };
  struct Place {
    std::size_t shard;
    std::size_t tensor;
  };

  fs::path path;
  std::vector<Shard> shards;
  std::vector<std::string> names;
  std::unordered_map<std::string, Place> places;

  void add(const fs::path& file, Bytes limit);
  void add_indexed(const Index& index, Bytes limit);
};

void SafetensorsReader::Impl::add(const fs::path& file, Bytes limit) {
  MappedFile mapped(file);
  SafetensorsHeader header = read_header(file, mapped.bytes(), limit);
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    const std::string& name = header.tensors[i].name;
    if (!places.emplace(name, Place{shards.size(), i}).second) {
      throw FileError(fmt::format("{}: tensor {} stands in {} too", file.string(), in_quotes(name),
                                  shards[places.at(name).shard].file.path().filename().string()));
    }
    names.push_back(name);
  }
  shards.push_back({std::move(mapped), std::move(header)});
}

void SafetensorsReader::Impl::add_indexed(const Index& index, Bytes limit) {
  for (const auto& [shard, wanted] : index.shards) {
    const fs::path file = index.file.parent_path() / shard;
    if (!is_there(file)) {
      throw FileError(fmt::format("{}: missing; {} names it for {} tensors, {} among them", file.string(),
                                  index.file.filename().string(), wanted.size(), in_quotes(*wanted.begin())));
    }
    add(file, limit);
    const auto& tensors = shards.back().header.tensors;
    for (const TensorEntry& tensor : tensors) {
      if (!wanted.contains(tensor.name)) {
        throw FileError(fmt::format("{}: it holds tensor {}, which {} does not place there", file.string(),
                                    in_quotes(tensor.name), index.file.filename().string()));
      }
    }
    for (const std::string& name : wanted) {
      const auto at = places.find(name);
      if (at == places.end() || at->second.shard + 1 != shards.size()) {
        throw FileError(fmt::format("{}: tensor {} is missing, though {} places it there", file.string(),
                                    in_quotes(name), index.file.filename().string()));
      }
    }
  }
}

SafetensorsReader::SafetensorsReader(const fs::path& file_or_folder, Bytes header_limit)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = file_or_folder;
  std::error_code ignored;  // what cannot be looked at fails below, when it is opened
  if (!fs::is_directory(file_or_folder, ignored)) {
    if (file_or_folder.string().ends_with(".safetensors.index.json")) {
      impl_->add_indexed(read_index(file_or_folder, header_limit), header_limit);
    } else {
      impl_->add(file_or_folder, header_limit);
    }
  } else if (is_there(file_or_folder / kWeightsFile)) {
    impl_->add(file_or_folder / kWeightsFile, header_limit);
  } else if (is_there(file_or_folder / kIndexFile)) {
    impl_->add_indexed(read_index(file_or_folder / kIndexFile, header_limit), header_limit);
  } else {
    throw FileError(fmt::format("{}: expected {} or {} in this folder{}", file_or_folder.string(), kWeightsFile,
                                kIndexFile, other_weights(file_or_folder)));
  }
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

const std::vector<std::string>& SafetensorsReader::names() const {
  return impl_->names;
}

bool SafetensorsReader::contains(const std::string& name) const {
  return impl_->places.contains(name);
}

TensorView SafetensorsReader::tensor(const std::string& name) const {
  const auto at = impl_->places.find(name);
  if (at == impl_->places.end()) {
    const std::string nearest = nearest_name(name, impl_->names);
    throw FileError(fmt::format("{}: no tensor {}{}", impl_->path.string(), in_quotes(name),
                                nearest.empty() ? "" : fmt::format("; the nearest name is {}", in_quotes(nearest))));
  }
  const Impl::Shard& shard = impl_->shards[at->second.shard];
  const TensorEntry& entry = shard.header.tensors[at->second.tensor];
  if (!entry.dtype) {
    throw FileError(fmt::format("{}: tensor {} has the type {}, which Spillway does not read; convert it to {}",
                                shard.file.path().string(), in_quotes(name), in_quotes(entry.dtype_word),
                                "F32, BF16 or F16"));
  }
  return {entry.name, *entry.dtype, entry.shape,
          shard.file.bytes().subspan(shard.header.data_start + entry.begin, entry.end - entry.begin)};
}

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return impl_->shards.front().header.metadata;
}

const fs::path& SafetensorsReader::path() const {
  return impl_->path;
}

std::int64_t TensorView::numel() const {
  return static_cast<std::int64_t>(bytes.size()) / size_of(dtype);
}

}  // namespace spillway
