// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "spillway/core/units.h"
#include "spillway/state/checkpoint_folder.h"

namespace spillway {

struct CheckpointOptions {
  std::int64_t keep = 0;     // newest checkpoints to keep in the folder, this one among them; 0: all
  std::string program = {};  // text that Engine::load gives back: where the program stands in its data, say
  /// Called as tensors are written, for progress. May be empty.
  std::function<void(Bytes done, Bytes total)> progress = {};
  Bytes max_file{std::int64_t{4} << 30};  // parts are cut there; a larger tensor has one of its own
};

struct CheckpointLoadOptions {
  /// Reads everything once before anything is taken over, so that damage is found first.
  bool verify = true;
  /// The learning rates and other numbers of the groups as they were saved. Otherwise those of the configuration.
  bool hyperparameters = true;
  std::function<void(Bytes done, Bytes total)> progress = {};
};

}  // namespace spillway
