// SPDX-License-Identifier: Apache-2.0
#include "comm/host_sum.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "kernels/cpu_kernels.h"
#include "kernels/denormal_mode.h"

namespace spillway {
namespace {

constexpr std::int64_t kTile = 1024;

const void* at(const void* array, std::int64_t bytes) {
  return static_cast<const std::byte*>(array) + bytes;
}
void* at(void* array, std::int64_t bytes) {
  return static_cast<std::byte*>(array) + bytes;
}

kernels::Element element(DType type) {
  return type == DType::f32    ? kernels::Element::f32
         : type == DType::bf16 ? kernels::Element::bf16
                               : kernels::Element::f16;
}

void sum_integers(std::span<void* const> targets, std::span<const void* const> sources, std::int64_t offset,
                  std::int64_t count) {
  std::array<std::uint64_t, kTile> total{}, next{};
  const auto bytes = static_cast<std::size_t>(count) * sizeof(std::uint64_t);
  for (const void* source : sources) {
    std::memcpy(next.data(), at(source, offset), bytes);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) total[i] += next[i];
  }
  for (void* target : targets) std::memcpy(at(target, offset), total.data(), bytes);
}

void sum_floats(std::span<void* const> targets, std::span<const void* const> sources, DType type, std::int64_t offset,
                std::int64_t count) {
  // Asking which kernels run here takes longer than a tile.
  static const kernels::CpuKernels& cpu = kernels::cpu_kernels();
  std::array<float, kTile> total;
  cpu.widen(total.data(), at(sources[0], offset), element(type), count);
  for (const void* source : sources.subspan(1)) cpu.accumulate(total.data(), at(source, offset), element(type), count);
  for (void* target : targets) {
    if (type == DType::f32) {
      std::memcpy(at(target, offset), total.data(), static_cast<std::size_t>(count) * sizeof(float));
    } else {
      cpu.narrow(at(target, offset), element(type), total.data(), count);
    }
  }
}

}  // namespace

void sum_values(std::span<void* const> targets, std::span<const void* const> sources, DType type, std::int64_t count) {
  const kernels::KeepDenormals keep;
  for (std::int64_t i = 0; i < count; i += kTile) {
    const std::int64_t offset = i * size_of(type), n = std::min(kTile, count - i);
    if (type == DType::i64) {
      sum_integers(targets, sources, offset, n);
    } else {
      sum_floats(targets, sources, type, offset, n);
    }
  }
}

}  // namespace spillway
