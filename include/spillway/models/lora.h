// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "spillway/core/dtype.h"
#include "spillway/models/causal_lm.h"
#include "spillway/state/lora_options.h"

// Low-rank adapters: a frozen model with small matrices beside some of its linear layers, which alone are trained. An
// engine gives states to these only. Adapters change before an engine is made or after it is gone: while the model's
// blocks are bound, every function here but save_lora throws StateError.

namespace spillway {

/// Freezes all parameters of `model` and gives the layers that `options` targets adapters of the layers' type: A drawn
/// uniformly from [-1/sqrt(in), 1/sqrt(in)] by a generator of its own (the same seed gives the same bits; a 16-bit A is
/// the rounded fp32 one), B zero, so that the model computes what it did. Parameters are those of
/// lora_parameter_shapes, after the weight and bias of their layer; those of a model without memory are without too.
/// The adapters' dropout draws from the model's generator. Throws, before anything is changed: InvalidArgument for a
/// model that has adapters; as lora_modules.
void add_lora(CausalLM& model, const LoraOptions& options, std::uint64_t seed);

/// Adds B A to the weights it belongs to (scaled; fp32, rounded once to the weight's type) and removes the adapters.
/// The parameters stay frozen. Throws: InvalidArgument for a model without adapters; StateError naming a parameter
/// whose memory is released.
void merge_lora(CausalLM& model);

/// Removes the adapters: the model is the frozen base again. Throws: InvalidArgument for a model without.
void remove_lora(CausalLM& model);

struct LoraSaveOptions {
  std::string base_model{};      // the folder or name that PEFT loads the base from; empty: to be given to PEFT
  std::optional<DType> dtype{};  // of the file; empty: the adapters'
  std::function<torch::Tensor(const std::string& name)> weights{};  // as SaveOptions::weights, for the adapters
  bool write = true;                                                // as SaveOptions::write
};

/// Writes the adapters as a PEFT folder: adapter_config.json and adapter_model.safetensors. Each file is complete on
/// disk before it takes its place. Throws: InvalidArgument for a model without adapters; StateError as save_causal_lm;
/// FileError.
void save_lora(const CausalLM& model, const std::filesystem::path& folder, const LoraSaveOptions& options = {});

/// Adds the adapters of a PEFT folder, as add_lora does, with the values stored there. Everything the folder says is
/// checked before the model is touched. Throws: what LoraOptions::load throws; FileError listing every tensor that is
/// missing, unexpected or of another shape or type; InvalidArgument as add_lora.
void load_lora(CausalLM& model, const std::filesystem::path& folder);

}  // namespace spillway
