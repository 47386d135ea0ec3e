// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/strict_json.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/state/checkpoint_folder.h"

namespace spillway {

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
  bool has_shape(const std::string& name, const torch::Tensor& like) const {
    const auto found = place_.find(name);
    return found != place_.end() && readers_[found->second].tensor(name).shape == like.sizes().vec();
  }
  /// Of no use in this run, and no fault.
  void leave(const std::string& name) {
    if (contains(name)) asked_.insert(name);
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
  const std::filesystem::path folder_;
  std::vector<SafetensorsReader> readers_;
  std::unordered_map<std::string, std::size_t> place_;
  std::unordered_set<std::string> asked_;
};

}  // namespace spillway
