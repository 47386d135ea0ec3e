// SPDX-License-Identifier: Apache-2.0
// The CUDA machine: memory, streams, events, and schedules without LibTorch.
#include <chrono>
#include <mutex>
#include <random>
#include <thread>

#include "cuda/gpu.h"
#include "spillway/core/error.h"
#include "support/training_run.h"

namespace spillway::test {
namespace {

OpDelay delay_of(unsigned seed) {
  const auto random = std::make_shared<std::mt19937>(seed);
  const auto mutex = std::make_shared<std::mutex>();
  return [random, mutex](const std::string&, const Op&) {
    unsigned draw = 0;
    {
      const std::scoped_lock lock(*mutex);
      draw = (*random)();
    }
    if (draw % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 8 % 60));
    if (draw % 8 == 1) std::this_thread::yield();
  };
}

std::unique_ptr<Machine> cuda_machine(MachineOptions options) {
  options.device.kind = DeviceConfig::Kind::cuda;
  return make_cuda_machine(options);
}

struct CudaMachine : OnGpu {};

TEST_F(CudaMachine, PinnedMemoryIsPageLockedToItsEndAndDeviceMemoryIsAligned) {
  const auto machine = cuda_machine({});
  for (std::int64_t size : {std::int64_t{512}, std::int64_t{70'144}, std::int64_t{96} << 20}) {
    const auto pinned = machine->make_pool(Tier::pinned, Bytes{size}),
               device = machine->make_pool(Tier::device, Bytes{size});
    const View host = pinned->allocate(Bytes{size}, MemoryUse::staging),
               gpu = device->allocate(Bytes{size}, MemoryUse::staging);
    for (const std::byte* address : {host.data, host.data + size / 2, host.data + size - 1}) {
      cudaPointerAttributes attributes{};
      ASSERT_EQ(cudaPointerGetAttributes(&attributes, address), cudaSuccess);
      EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
    }
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(gpu.data) % 512, 0u);
    cudaPointerAttributes attributes{};
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, gpu.data), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  }
  EXPECT_EQ(machine->ledger(Tier::pinned)->used().total().value, 0);
}

TEST_F(CudaMachine, TooMuchDeviceMemoryIsRefusedAndTheMachineGoesOn) {
  const auto machine = cuda_machine({});
  const Bytes all = find_gpu(0).memory;
  EXPECT_THROW(static_cast<void>(machine->make_pool(Tier::device, all + all)), OutOfMemory);
  EXPECT_NO_THROW(static_cast<void>(machine->make_pool(Tier::device, Bytes{4096})));
  MachineOptions options;
  options.device.memory = all + all;
  EXPECT_THROW(static_cast<void>(cuda_machine(options)), OutOfMemory);
}

// Round and round through three slots of device memory: each copy waits for events of the other stream.
TEST_F(CudaMachine, CopiesOfBothDirectionsKeepTheirOrder) {
  constexpr std::int64_t kBytes = 1 << 20, kSlots = 3, kRounds = 200;
  MachineOptions options;
  options.delay = delay_of(3);
  const auto machine = cuda_machine(options);
  const auto pinned = machine->make_pool(Tier::pinned, Bytes{kBytes * (kRounds + 1)});
  const auto device = machine->make_pool(Tier::device, Bytes{kBytes * kSlots});
  const View slots = device->allocate(Bytes{kBytes * kSlots}, MemoryUse::staging);
  std::vector<View> buffers;
  for (std::int64_t i = 0; i <= kRounds; ++i) buffers.push_back(pinned->allocate(Bytes{kBytes}, MemoryUse::staging));
  for (std::int64_t i = 0; i < kBytes / 4; ++i) buffers[0].as<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7);
  std::vector<Ticket> freed(kSlots);
  Ticket arrived;
  for (std::int64_t i = 0; i < kRounds; ++i) {
    const auto slot = static_cast<std::size_t>(i % kSlots);
    std::byte* there = slots.data + i % kSlots * kBytes;
    const std::byte* from = buffers[static_cast<std::size_t>(i)].data;
    std::byte* to = buffers[static_cast<std::size_t>(i) + 1].data;
    const Ticket up =
        machine->upload().submit({"up", i, OpKind::copy, kBytes, {arrived, freed[slot]}, [=](StreamRef s) {
                                    copy_async(s, there, from, Bytes{kBytes});
                                  }});
    arrived = machine->download().submit(
        {"down", i, OpKind::copy, kBytes, {up}, [=](StreamRef s) { copy_async(s, to, there, Bytes{kBytes}); }});
    freed[slot] = arrived;
  }
  arrived.wait();
  EXPECT_TRUE(std::equal(buffers[0].data, buffers[0].data + kBytes, buffers[kRounds].data));
}

class CudaSchedules : public OnGpu, public testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, CudaSchedules, testing::ValuesIn(schedule_names()));

TEST_P(CudaSchedules, EndInTheBitsOfTheEmulatedDevice) {
  for (DType working : {DType::f32, DType::bf16, DType::f16}) {
    for (std::int64_t infinite_step : {-1, 2}) {
      const Case base{.working = working,
                      .low_memory = infinite_step > 0 && working != DType::f32,
                      .uneven = true,
                      .infinite_step = infinite_step};
      const Outcome expected = reference(base);
      for (std::int64_t chunk : {1024, 5000, 1 << 16}) {
        for (unsigned seed : {0U, 1U, 2U}) {
          Case c = base;
          c.schedule = GetParam();
          c.chunk_elements = chunk;
          c.slots = 1 + seed;
          c.threads = 2;
          c.order_seed = seed;
          if (seed != 0) c.delay = delay_of(seed);
          c.machine = cuda_machine;
          expect_same(expected, TrainingRun(c).train());
        }
      }
    }
  }
}

TEST_P(CudaSchedules, DelaysChangeNoBit) {
  const Case base{.steps = 3, .uneven = true, .infinite_step = 1};
  const Outcome expected = reference(base);
  for (unsigned seed = 1; seed <= 50; ++seed) {
    Case c = base;
    c.schedule = GetParam();
    c.slots = 1 + seed % 3;
    c.chunk_elements = 1024 * (1 + seed % 5);
    c.order_seed = seed;
    c.delay = delay_of(seed);
    c.machine = cuda_machine;
    expect_same(expected, TrainingRun(c).train());
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace spillway::test
