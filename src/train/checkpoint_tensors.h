// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <span>
#include <string>

#include "spillway/formats/safetensors.h"

namespace spillway {

/// A tensor as checkpoints hold it: complex numbers as pairs of real ones.
torch::Tensor as_stored(const torch::Tensor& tensor);
/// The type of a buffer. Throws: InvalidArgument naming one that checkpoints cannot hold.
DType dtype_of(const torch::Tensor& tensor, const std::string& name);

/// Copies a tensor's bytes, wherever it is. Shapes: as many bytes as it has.
void copy_out(const torch::Tensor& tensor, std::span<std::byte> target);
/// A tensor as what a file is written from.
TensorSource source_of(std::string name, const torch::Tensor& tensor);
/// A copy of a checkpoint's tensor in ordinary memory.
torch::Tensor tensor_of(const TensorView& view, torch::ScalarType type);

/// The state of a device's random number generator.
torch::Tensor random_state(torch::Device device);
void set_random_state(torch::Device device, const torch::Tensor& state);
/// Throws: FileError where the bytes are no state of such a generator.
void check_random_state(torch::Device device, const torch::Tensor& state, const std::string& where);

}  // namespace spillway
