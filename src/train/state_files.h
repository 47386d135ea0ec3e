// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/strict_json.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/state/checkpoint_folder.h"

namespace spillway {

/// A run of elements of a parameter's state, flattened.
struct StatePart {
  std::int64_t offset = 0;
  TensorView view;  // fp32
};

/// The tensors of all state files of a checkpoint, and which of them were asked for.
class StateFiles {
 public:
  StateFiles(const std::filesystem::path& folder, const CheckpointManifest& manifest) : folder_(folder) {
    for (const CheckpointFile& file : manifest.files) {
      readers_.emplace_back(folder / file.name);
      for (const std::string& name : readers_.back().names()) {
        if (!place_.emplace(name, readers_.size() - 1).second) {
          throw FileError(fmt::format("{}: tensor {} stands in two files", folder.string(), in_quotes(name)));
        }
        note_part(name);
      }
    }
  }
  bool contains(const std::string& name) const { return place_.count(name) > 0; }
  /// Throws: FileError where it is missing or of another type or shape.
  TensorView get(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) {
    const auto found = place_.find(name);
    if (found == place_.end()) throw FileError(fmt::format("{}: tensor {} is missing", folder_.string(), name));
    TensorView view = readers_[found->second].tensor(name);
    if (view.dtype != dtype || view.shape != shape) {
      throw FileError(fmt::format("{}: tensor {} is {} {}; expected {} {}", folder_.string(), name,
                                  to_string(view.dtype), c10::str(view.shape), to_string(dtype), c10::str(shape)));
    }
    asked_.insert(name);
    return view;
  }
  /// The state `role` of a parameter, whole or in parts that together cover it, in order. Throws: FileError naming what
  /// is missing, overlaps, or has another type or shape.
  std::vector<StatePart> parts(const std::string& role, const std::string& parameter,
                               const std::vector<std::int64_t>& shape) {
    const std::string whole = role + "/" + parameter;
    const auto found = parts_.find(whole);
    const bool empty = std::count(shape.begin(), shape.end(), 0) > 0;
    if (empty && found == parts_.end() && !contains(whole)) return {};  // nothing to keep
    if (found == parts_.end()) return {{0, get(whole, DType::f32, shape)}};
    if (contains(whole))
      throw FileError(fmt::format("{}: tensor {} is there whole and in parts", folder_.string(), whole));
    std::int64_t numel = 1, next = 0;
    for (const std::int64_t size : shape) numel *= size;
    std::vector<StatePart> out;
    for (const auto& [offset, name] : found->second) {
      const TensorView view = readers_[place_.at(name)].tensor(name);
      const std::int64_t count = view.numel();
      if (view.dtype != DType::f32 || view.shape.size() != 1 || offset != next || count > numel - next) {
        throw FileError(
            fmt::format("{}: tensor {} is {} {}; expected fp32 in one dimension, from element {} of {} on (a part is "
                        "missing or there twice)",
                        folder_.string(), name, to_string(view.dtype), c10::str(view.shape), next, numel));
      }
      next += count;
      out.push_back({offset, view});
      asked_.insert(name);
    }
    if (next == numel) return out;
    throw FileError(fmt::format("{}: the parts of {} end at element {} of {}: one is missing", folder_.string(), whole,
                                next, numel));
  }
  bool has_shape(const std::string& name, const torch::Tensor& like) const {
    const auto found = place_.find(name);
    return found != place_.end() && readers_[found->second].tensor(name).shape == like.sizes().vec();
  }
  /// Random numbers of others are of no use in this run, and no fault.
  void leave_others_random() {
    for (const auto& [name, reader] : place_) {
      const std::string role = name.substr(0, name.find('/'));
      if (role == "random" || role.rfind("random-", 0) == 0) asked_.insert(name);
    }
  }
  /// Throws: FileError naming a tensor that nothing asked for.
  void check_all_asked() const {
    if (asked_.size() == place_.size()) return;
    for (const auto& [name, reader] : place_) {
      if (asked_.count(name) == 0) {
        throw FileError(fmt::format("{}: nothing in this run is called {}", folder_.string(), in_quotes(name)));
      }
    }
  }

 private:
  // "master@4096/layer.w" is the part of "master/layer.w" that starts at element 4096.
  void note_part(const std::string& name) {
    const std::size_t slash = name.find('/'), at = name.find('@');
    if (slash == std::string::npos || at >= slash) return;
    std::int64_t offset = 0;
    const char* const end = name.data() + slash;
    const auto [stopped, error] = std::from_chars(name.data() + at + 1, end, offset);
    if (error != std::errc() || stopped != end || offset < 0) return;
    if (!parts_[name.substr(0, at) + name.substr(slash)].emplace(offset, name).second)
      throw FileError(fmt::format("{}: tensor {} is there twice", folder_.string(), in_quotes(name)));
  }

  const std::filesystem::path folder_;
  std::vector<SafetensorsReader> readers_;
  std::unordered_map<std::string, std::size_t> place_;
  std::unordered_set<std::string> asked_;
  std::unordered_map<std::string, std::map<std::int64_t, std::string>> parts_;  // of a name without its offset
};

}  // namespace spillway
