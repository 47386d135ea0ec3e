// SPDX-License-Identifier: Apache-2.0
//
// Weights that go straight into the engine: the same run as from a loaded model, without a second copy in memory.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "spillway/core/error.h"
#include "spillway/models/lora.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "support/process_memory.h"
#include "train/branches.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using test::same_bits;
using test::tiny_config;

class StreamedLoad : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / "spillway_streamed_load";
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

EngineOptions streamed(const CausalLM& model, const fs::path& folder) {
  EngineOptions options;
  options.weights = folder_weights(model, folder);
  return options;
}

TEST_F(StreamedLoad, IsTheRunOfALoadedModel) {
  for (DType stored : {DType::f32, DType::bf16}) {
    save_causal_lm(*test::tiny_llama(true), folder_, {.dtype = stored});
    for (const char* schedule : {"resident", "zero_offload"}) {
      for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
        Config config = tiny_config(schedule, 0.5, 4096, 1);
        config.precision = precision;
        config.loss_scale.initial = 256;
        const test::RunOptions plain{.steps = 4};
        const test::FinalState expected = test::train(load_causal_lm(folder_), config, plain);
        const auto model = empty_causal_lm(ModelConfig::load(folder_));
        test::RunOptions straight = plain;
        straight.engine = streamed(*model, folder_);
        test::expect_same_bits(expected, test::train(model, config, straight));
      }
    }
  }
}

TEST_F(StreamedLoad, OfAFrozenBaseLeavesItsAdaptersTheirOwnValues) {
  save_causal_lm(*test::tiny_llama(false), folder_);
  Config config = tiny_config("zero_offload", 0.5, 4096, 1);
  config.precision = DType::bf16;
  const LoraOptions lora{.rank = 2, .targets = {"all-linear"}};
  const auto loaded = load_causal_lm(folder_), empty = empty_causal_lm(ModelConfig::load(folder_));
  test::RunOptions straight{.steps = 3};
  straight.engine = streamed(*empty, folder_);
  add_lora(*loaded, lora, 4);
  add_lora(*empty, lora, 4);
  test::expect_same_bits(test::train(loaded, config, {.steps = 3}), test::train(empty, config, straight));
}

std::int64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    long long kibibytes = 0;
    if (std::sscanf(line.c_str(), "RssAnon: %lld kB", &kibibytes) == 1) return kibibytes * 1024;
  }
  return 0;
}

// What is measured is what the engine holds, not what malloc keeps of freed tensors, nor the two megabytes that the
// header of an allocation that is never used brings in where pages are huge.
struct ExactMemory {
  ExactMemory() {
    mallopt(M_MMAP_THRESHOLD, 64 * 1024);
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  }
  ~ExactMemory() {
    mallopt(M_MMAP_THRESHOLD, 128 * 1024);
    prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
  }
};

TEST_F(StreamedLoad, HoldsThePlanAndOneTensorAtATime) {
  if (!test::kProcessMemoryIsMeasurable) GTEST_SKIP() << "a sanitizer keeps notes in the process's memory";
  const ExactMemory exact_memory;
  ModelConfig shape = test::tiny_llama(false)->config();
  shape.vocabulary = 4000;
  shape.hidden = 512;
  shape.intermediate = 1024;
  shape.layers = 6;
  shape.heads = shape.kv_heads = 8;
  shape.head_dim = 64;
  save_causal_lm(*make_causal_lm(shape, 1), folder_);
  const std::int64_t weights = static_cast<std::int64_t>(fs::file_size(folder_ / "model.safetensors"));
  const std::int64_t largest = std::int64_t{4000} * 512 * 4;
  for (DType precision : {DType::f32, DType::bf16}) {
    Config config = tiny_config("zero_offload", 0, 0, 1);
    config.precision = precision;
    const auto model = empty_causal_lm(shape);
    EngineOptions options = streamed(*model, folder_);
    const std::int64_t before = anonymous_bytes();
    std::int64_t most = 0;
    options.weights = [&, read = options.weights](const std::string& name) {
      most = std::max(most, anonymous_bytes() - before);
      return read(name);
    };
    const MemoryPlan plan = plan_memory(*model, config);
    const std::int64_t planned = plan[Tier::device].total().value + plan[Tier::pinned].total().value;
    Engine engine(*model, config, options);
    most = std::max(most, anonymous_bytes() - before);
    EXPECT_GT(most, planned * 9 / 10) << "the pools are there";
    // The tensor in the file's type and its widened copy; a second copy of the weights would show.
    EXPECT_LT(most, planned + 2 * largest + (1 << 20));
    EXPECT_GT(weights, 3 * largest) << "or this would show nothing";
  }
}

TEST_F(StreamedLoad, WeightsOfAnotherShapeAreRefusedByName) {
  const auto model = test::make_branches();
  EngineOptions options;
  options.weights = [](const std::string& name) { return name == "b.weight" ? torch::zeros({3, 3}) : torch::Tensor(); };
  try {
    Engine engine(*model, test::plain("zero_offload"), options);
    FAIL() << "they were taken";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("b.weight"), std::string::npos) << error.what();
  }
  Engine engine(*model, test::plain("zero_offload"));  // the module is whole
}

}  // namespace
}  // namespace spillway
