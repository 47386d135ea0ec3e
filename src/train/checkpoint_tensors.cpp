// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_tensors.h"

#include <fmt/format.h>

#include <cstring>

#include "spillway/core/error.h"
#include "spillway/train/device_scope.h"

namespace spillway {

DType dtype_of(const torch::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case torch::kFloat:
      return DType::f32;
    case torch::kDouble:
      return DType::f64;
    case torch::kBFloat16:
      return DType::bf16;
    case torch::kHalf:
      return DType::f16;
    case torch::kLong:
      return DType::i64;
    case torch::kInt:
      return DType::i32;
    case torch::kShort:
      return DType::i16;
    case torch::kChar:
      return DType::i8;
    case torch::kByte:
      return DType::u8;
    case torch::kBool:
      return DType::boolean;
    default:
      throw InvalidArgument(
          fmt::format("buffer {} is {}, which checkpoints cannot hold", name, c10::toString(tensor.scalar_type())));
  }
}

void copy_out(const torch::Tensor& tensor, std::span<std::byte> target) {
  const HostScope host;
  const torch::Tensor here = tensor.detach().to(torch::kCPU).contiguous();
  check(here.nbytes() == target.size(), "a tensor fills its place in a file");
  if (!target.empty()) std::memcpy(target.data(), here.const_data_ptr(), target.size());
}

TensorSource source_of(std::string name, const torch::Tensor& tensor) {
  return {name, dtype_of(tensor, name), tensor.sizes().vec(),
          [tensor](std::span<std::byte> target) { copy_out(tensor, target); }};
}

torch::Tensor tensor_of(const TensorView& view, torch::ScalarType type) {
  const HostScope host;
  torch::Tensor out = torch::empty(view.shape, torch::TensorOptions().dtype(type));
  if (!view.bytes.empty()) std::memcpy(out.mutable_data_ptr(), view.bytes.data(), view.bytes.size());
  return out;
}

torch::Tensor random_state(torch::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(torch::Device device, const torch::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state);
}

void check_random_state(torch::Device device, const torch::Tensor& state, const std::string& where) {
  try {
    at::Generator generator = at::globalContext().defaultGenerator(device).clone();
    generator.set_state(state);
  } catch (const std::exception& error) {
    throw FileError(fmt::format("{}: random numbers cannot go on from what is stored: {}", where, error.what()));
  }
}

}  // namespace spillway
