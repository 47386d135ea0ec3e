// SPDX-License-Identifier: Apache-2.0
// The engine on a GPU: placement changes no bit. Without a GPU: it is refused with the way out.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "spillway/core/error.h"
#include "spillway/device/gpu.h"
#include "train/training_runs.h"

namespace spillway::test {
namespace {

Config on_gpu(Config config) {
  config.device.kind = DeviceConfig::Kind::cuda;
  return config;
}

// The tests' programs are found a GPU by; LibTorch may have none of its own.
std::string why_not() {
  const std::string reason = why_no_gpu(0);
  if (!reason.empty()) return reason;
  return torch::cuda::is_available() ? "" : "LibTorch finds none";
}

TEST(NoGpu, IsRefusedWithTheReasonAndTheEmulatedDevice) {
  if (why_not().empty()) GTEST_SKIP() << "this machine has a GPU";
  const auto model = tiny_llama(false);
  const torch::Tensor before = model->parameters().front().detach().clone();
  try {
    const Engine engine(*model, on_gpu(tiny_config("zero_offload", 1, 4096, 1)));
    FAIL() << "a GPU was found";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("no usable GPU"), std::string::npos) << text;
    EXPECT_NE(text.find("emulated device"), std::string::npos) << text;
  }
  EXPECT_TRUE(torch::equal(before, model->parameters().front()));  // and the module is as it was
  const Engine emulated(*model, tiny_config("zero_offload", 1, 4096, 1));
}

TEST(NoGpu, APlanNeedsNone) {
  const auto model = tiny_llama(false);
  const MemoryPlan plan = plan_memory(*model, on_gpu(tiny_config("resident", 1, 4096, 1)));
  const MemoryPlan emulated = plan_memory(*model, tiny_config("resident", 1, 4096, 1));
  EXPECT_GT(plan[Tier::device].total(), emulated[Tier::device].total());  // the norm's grain sums
  EXPECT_EQ(plan[Tier::device][MemoryUse::parameters], emulated[Tier::device][MemoryUse::parameters]);
}

class CudaEngine : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not();
    if (!reason.empty()) GTEST_SKIP() << "no usable GPU: " << reason;
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST_F(CudaEngine, OffloadedRunsEndInTheBitsOfTheResidentRun) {
  for (DType precision : {DType::f32, DType::bf16}) {
    for (bool tied : {false, true}) {
      Config config = on_gpu(tiny_config("resident", 0.5, 1 << 20, 1));
      config.precision = precision;
      const FinalState expected = train(tiny_llama(tied), config, {.steps = 12, .micro_batches = 2});
      for (std::int64_t chunk : {1024, 8192}) {
        for (const char* schedule : {"resident", "zero_offload"}) {
          config.schedule = schedule;
          config.chunk_elements = chunk;
          config.threads = 2;
          expect_same_bits(expected, train(tiny_llama(tied), config, {.steps = 12, .micro_batches = 2}));
        }
      }
    }
  }
}

TEST_F(CudaEngine, TheCurveIsThatOfTheEmulatedDeviceUpToRounding) {
  const RunOptions options{.steps = 12, .micro_batches = 2};
  const FinalState expected = train(tiny_llama(false), tiny_config("resident", 0.5, 4096, 1), options);
  const FinalState actual = train(tiny_llama(false), on_gpu(tiny_config("zero_offload", 0.5, 4096, 1)), options);
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-4 * std::abs(expected.losses[i]));
  }
}

TEST_F(CudaEngine, TheModuleIsOnTheGpuWhileItHasItsEngineAndOnTheHostAfterwards) {
  const auto model = tiny_llama(false);
  {
    Engine engine(*model, on_gpu(tiny_config("zero_offload", 1, 4096, 1)));
    for (const torch::Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.is_cuda());
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(parameter.data_ptr()) % 512, 0u);
    }
    engine.release();
    EXPECT_TRUE(model->parameters().front().is_cpu());
    engine.restore();
    EXPECT_TRUE(model->parameters().front().is_cuda());
  }
  for (const torch::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.is_cpu());
}

}  // namespace
}  // namespace spillway::test
