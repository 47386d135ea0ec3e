// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/offload/machine.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "kernels/cpu_kernels.h"
#include "kernels/denormal_mode.h"
#include "spillway/core/error.h"
#include "spillway/device/gpu.h"
#include "train/torch_device.h"

namespace spillway::bench {
namespace {

/// Arrays that start at the same offset of their pages can be slow: each starts at another one.
constexpr std::int64_t kStagger = 576;

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace

std::unique_ptr<Machine> make_machine(const DeviceConfig& device, int threads) {
  MachineOptions options;
  options.device = device;
  options.current_stream = torch_stream(device);
  options.threads = threads;
  return spillway::make_machine(std::move(options));
}

MachineFacts machine_facts() {
  MachineFacts facts;
  facts.processor = processor_name();
  facts.cores = available_cores();
  facts.instruction_set = kernels::cpu_kernels().name;
  if (const auto memory = available_host_memory()) facts.memory_bytes = memory->value;
  std::ifstream load("/proc/loadavg");
  if (double value = 0; load >> value) facts.load = value;
  return facts;
}

const char* to_string(Direction direction) {
  return direction == Direction::h2d ? "h2d" : "d2h";
}

CopyLoop::CopyLoop(Machine& machine, Tier host_tier, Direction direction, Bytes size)
    : direction_(direction),
      size_(size),
      copies_(std::clamp<std::int64_t>((std::int64_t{4} << 20) / size.value, 1, 64)),
      lane_(direction == Direction::h2d ? machine.upload() : machine.download()),
      host_pool_(machine.make_pool(host_tier, Pool::padded(size))),
      device_pool_(machine.make_pool(Tier::device, Pool::padded(size))),
      host_(host_pool_->allocate(size, MemoryUse::staging)),
      device_(device_pool_->allocate(size, MemoryUse::staging)) {}

void CopyLoop::submit() {
  const bool up = direction_ == Direction::h2d;
  std::byte* to = up ? device_.data : host_.data;
  const std::byte* from = up ? host_.data : device_.data;
  for (std::int64_t i = 0; i < copies_; ++i) {
    newest_ = lane_.submit({to_string(direction_),
                            i,
                            OpKind::copy,
                            static_cast<double>(size_.value),
                            {},
                            [to, from, size = size_](StreamRef stream) { copy_async(stream, to, from, size); }});
  }
}

Activity CopyLoop::activity() {
  // The next operation is under way while one is waited for: so the lane never runs dry.
  const auto once = [this] {
    const Ticket before = newest_;
    submit();
    before.wait();
  };
  return {to_string(direction_), [this] { submit(); }, once, [this] { newest_.wait(); }};
}

AdamLoop::AdamLoop(Machine& machine, std::int64_t count, bool bf16_copy)
    : machine_(machine), count_(count), bf16_copy_(bf16_copy) {
  const Bytes wide = Pool::padded({count * 4 + 5 * kStagger}), narrow = Pool::padded({count * 2 + 5 * kStagger});
  pool_ = machine.make_pool(Tier::pinned, wide * 4 + narrow);
  std::int64_t arrays = 0;
  const auto next = [&](Bytes bytes) {
    return pool_->allocate(bytes, MemoryUse::optimizer_states).data + kStagger * arrays++;
  };
  p_ = reinterpret_cast<float*>(next(wide));
  m_ = reinterpret_cast<float*>(next(wide));
  v_ = reinterpret_cast<float*>(next(wide));
  g_ = reinterpret_cast<float*>(next(wide));
  copy_ = next(narrow);
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    g_[i] = static_cast<float>(state >> 8) * 0x1p-24f - 0.4f;
    p_[i] = 0.1f * g_[i];
    m_[i] = 0.1f * g_[i];
    v_[i] = g_[i] * g_[i];
  }
}

void AdamLoop::update() {
  static const kernels::AdamScalars scalars = kernels::adam_scalars(1e-4, 0.9, 0.999, 1e-8, 0.01, true, 100, 0.5F);
  const kernels::Element type = bf16_copy_ ? kernels::Element::bf16 : kernels::Element::none;
  const std::int64_t grains = (count_ + kernels::kGrain - 1) / kernels::kGrain;
  machine_.cpu_team().parallel_for(grains, [&](std::int64_t from, std::int64_t to) {
    const kernels::KeepDenormals keep;
    const std::int64_t i = from * kernels::kGrain, end = std::min(to * kernels::kGrain, count_);
    if (i >= end) return;
    kernels::cpu_kernels().adam(scalars, p_ + i, m_ + i, v_ + i, g_ + i, kernels::Element::f32,
                                bf16_copy_ ? copy_ + 2 * i : nullptr, type, end - i);
  });
}

Activity AdamLoop::activity() {
  const auto once = [this] {
    machine_.cpu()
        .submit({"update", 0, OpKind::optimizer, static_cast<double>(count_), {}, [this](StreamRef) { update(); }})
        .wait();
  };
  return {"adam", {}, once, {}};
}

}  // namespace spillway::bench
