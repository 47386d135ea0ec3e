// SPDX-License-Identifier: Apache-2.0
//
// The core of an installed Spillway: writes a safetensors file, reads it back, and plans the memory of training it.
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <vector>

#include "spillway/core/log.h"
#include "spillway/formats/safetensors.h"
#include "spillway/memory/ledger.h"
#include "spillway/state/chunk_store.h"
#include "spillway/state/layout.h"

namespace {

void write_weights(const std::filesystem::path& file) {
  const auto ones = [](std::span<std::byte> bytes) {
    const float one = 1;
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(one)) std::memcpy(&bytes[at], &one, sizeof(one));
  };
  const std::vector<spillway::TensorSource> tensors = {{"up", spillway::DType::f32, {512, 64}, ones},
                                                       {"down", spillway::DType::f32, {64, 512}, ones}};
  spillway::write_safetensors(file, tensors);
}

spillway::Bytes offloaded_device_bytes(const spillway::Layout& layout) {
  spillway::StateSpec spec;
  spec.placement.assign(layout.chunks().size(), spillway::ChunkPlacement::all(spillway::Tier::pinned));
  const spillway::MemoryPlan plan = spillway::plan_state(layout, spec);
  return plan[spillway::Tier::device].total();
}

int run(const std::filesystem::path& file) {
  write_weights(file);
  const spillway::SafetensorsReader reader(file);
  std::vector<spillway::ParameterInfo> parameters;
  for (const std::string& name : reader.names()) parameters.push_back({name, reader.tensor(name).shape});
  const spillway::Layout layout(std::move(parameters), 16384);
  const spillway::Bytes device = offloaded_device_bytes(layout);
  std::printf("%zu chunks, device %s\n", layout.chunks().size(), spillway::to_string(device).c_str());
  // Weights alone: two times 512 x 64 elements of four bytes.
  return layout.chunks().size() == 4 && device == spillway::Bytes{2 * 512 * 64 * 4} ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return argc == 2 ? run(argv[1]) : 2;
  } catch (const std::exception& error) {
    spillway::log({}, spillway::LogLevel::warning, error.what());
    return 1;
  }
}
