// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_tensors.h"

#include <fmt/format.h>

#include <cstring>

#include "spillway/core/error.h"
#include "spillway/train/device_scope.h"

namespace spillway {

torch::Tensor as_stored(const torch::Tensor& tensor) {
  return tensor.is_complex() ? torch::view_as_real(tensor.detach().resolve_conj()) : tensor;
}

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

namespace {

// A CPU generator's state begins with a seed (8 bytes), how many numbers are left before it makes more (4), whether it
// is seeded (4), and the place of the next one (8). LibTorch looks at each by itself, and reads behind the end of its
// 624 numbers where the two do not fit.
void check_place(const torch::Tensor& state) {
  constexpr std::uint64_t kNumbers = 624;
  std::int32_t left = 0;
  std::uint64_t next = 0;
  check(state.nbytes() >= 24, "LibTorch has taken the state");
  const auto* bytes = static_cast<const std::byte*>(state.const_data_ptr());
  std::memcpy(&left, bytes + 8, sizeof(left));
  std::memcpy(&next, bytes + 16, sizeof(next));
  require(left >= 1 && next <= kNumbers && static_cast<std::uint64_t>(left) + next <= kNumbers + 1,
          fmt::format("{} numbers left at place {} of {}", left, next, kNumbers));
}

}  // namespace

void check_random_state(torch::Device device, const torch::Tensor& state, const std::string& where) {
  try {
    at::Generator generator = at::globalContext().defaultGenerator(device).clone();
    generator.set_state(state);
    if (device.is_cpu()) check_place(state);
  } catch (const std::exception& error) {
    throw FileError(fmt::format("{}: random numbers cannot go on from what is stored: {}", where, error.what()));
  }
}

}  // namespace spillway
