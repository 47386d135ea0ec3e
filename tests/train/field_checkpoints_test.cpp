// SPDX-License-Identifier: Apache-2.0
//
// Faults that users of offloaded training systems met when they saved, resumed and exported: memory, counters, what is
// left behind. docs/field_reports.md says which report each test answers.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "formats/format_support.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/train/checkpoint.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "support/process_memory.h"
#include "train/branches.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using test::Branches;
using test::make_branches;
using test::plain;
using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

class CheckpointReports : public testing::TestWithParam<std::string> {
 protected:
  const test::TempFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(All, CheckpointReports, testing::ValuesIn(test::schedule_names()));

torch::Tensor rows(std::int64_t number) {
  const HostScope host;
  return (torch::arange(24).reshape({2, 12}) * (number % 5 + 1)) % 64;
}

double one_step(Engine& engine, CausalLM& model, std::int64_t number) {
  const torch::Tensor tokens = rows(number);
  const torch::Tensor loss = next_token_loss(model.forward(tokens), tokens, 24);
  engine.backward(loss, {.last = true});
  engine.step();
  return loss.item<double>();
}

Config config_of(const std::string& schedule, DType precision) {
  Config config = tiny_config(schedule, 1, 4096, 1);
  config.precision = precision;
  config.loss_scale = {.initial = 512};
  return config;
}

template <class Module>
void expect_same_state(const Module& model, Engine& expected, Engine& actual) {
  for (const std::string& name : test::trained_names(model)) {
    EXPECT_TRUE(same_bits(expected.master(name), actual.master(name))) << name;
    for (std::int64_t k : {0, 1}) {
      EXPECT_TRUE(same_bits(expected.optimizer_state(name, k), actual.optimizer_state(name, k))) << name;
    }
    EXPECT_EQ(expected.updates(name), actual.updates(name)) << name;
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------

TEST_P(CheckpointReports, ARunIsResumedInExactlyTheMemoryItRanIn) {
  for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
    fs::remove_all(folder_.path() / "saved");
    Config config = config_of(GetParam(), precision);
    const auto model = tiny_llama(true), other = tiny_llama(true, 77);
    Bytes device, host;
    {
      Engine engine(*model, config);
      for (int step = 0; step < 3; ++step) one_step(engine, *model, step);
      engine.save(folder_ / "saved");
      device = engine.summary().device_peak;
      host = engine.summary().host_peak;
    }
    config.device.memory = device;  // a byte more is out of memory
    Engine resumed(*other, config);
    resumed.load(folder_ / "saved");
    for (int step = 3; step < 6; ++step) one_step(resumed, *other, step);
    EXPECT_EQ(resumed.summary().device_peak, device);
    EXPECT_EQ(resumed.summary().host_peak, host);
  }
}

/// Weights that are large beside everything else a process does.
struct Wide : torch::nn::Module {
  Wide() {
    for (int i = 0; i < 4; ++i) register_parameter(std::to_string(i), torch::zeros({kSide, kSide}));
  }
  torch::Tensor forward() {
    torch::Tensor x = torch::ones({1, kSide});
    for (const torch::Tensor& w : parameters()) x = torch::matmul(x, w) + 1;
    return x.mean();
  }
  static constexpr std::int64_t kSide = 1200;
  static constexpr std::int64_t kBytes = kSide * kSide * 4;
};

TEST_P(CheckpointReports, SavingAndLoadingTakeAPieceOfMemoryAndNotASecondModel) {
  if (!test::kProcessMemoryIsMeasurable) GTEST_SKIP() << "memory is measured in builds without sanitizers";
  ASSERT_EQ(mallopt(M_MMAP_THRESHOLD, 1 << 20), 1) << "what is freed goes back to the system at once";
  Wide model;
  Engine engine(model, plain(GetParam()));
  for (int round = 0; round < 2; ++round) {
    engine.backward(model.forward(), {.last = true});
    engine.step();
    engine.wait_parameters();
    const std::int64_t before = test::own_bytes();
    std::int64_t most = 0;
    const auto watch = [&most](Bytes, Bytes) { most = std::max(most, test::own_bytes()); };
    engine.save(folder_ / "saved", {.keep = 1, .progress = watch});
    engine.load(folder_ / "saved", {.progress = watch});
    constexpr std::int64_t kRest = 4 << 20;
    EXPECT_LT(most - before, 2 * Wide::kBytes + kRest) << "twelve tensors of this size were saved and loaded";
    EXPECT_LT(test::own_bytes() - before, kRest);
  }
}

TEST_P(CheckpointReports, AfterLoadingNothingIsHeldThatARunNeverResumedDoesNotHold) {
  const auto model = tiny_llama(true);
  Engine engine(*model, config_of(GetParam(), DType::bf16));
  one_step(engine, *model, 0);
  engine.save(folder_ / "saved");
  const MemoryUsage device = engine.memory_in_use(Tier::device), pinned = engine.memory_in_use(Tier::pinned);
  std::int64_t own = 0;
  const std::int64_t descriptors = test::open_descriptors();
  for (int load = 0; load < 40; ++load) {
    engine.load(folder_ / "saved");
    if (load == 5) own = test::own_bytes();
  }
  EXPECT_EQ(engine.memory_in_use(Tier::device), device);
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), pinned);
  EXPECT_EQ(test::open_descriptors(), descriptors);
  EXPECT_FALSE(test::is_mapped(folder_.path()));
  if (test::kProcessMemoryIsMeasurable) {
    EXPECT_LT(test::own_bytes() - own, 1 << 20);
  }
}

TEST_P(CheckpointReports, ThreeHundredStepsWithSavesLeaveMemoryDescriptorsAndDiskAsTheyWere) {
  const auto model = tiny_llama(true);
  Config config = config_of(GetParam(), DType::bf16);
  config.device.memory = Bytes{std::int64_t{4} << 20};
  Engine engine(*model, config);
  MemoryUsage device, pinned;
  std::int64_t own = 0, descriptors = 0;
  for (int step = 1; step <= 300; ++step) {
    one_step(engine, *model, step);
    if (step % 5 == 0) engine.save(folder_ / "saved", {.keep = 2});
    if (step != 50) continue;
    device = engine.memory_in_use(Tier::device);
    pinned = engine.memory_in_use(Tier::pinned);
    own = test::own_bytes();
    descriptors = test::open_descriptors();
  }
  EXPECT_EQ(engine.memory_in_use(Tier::device), device);
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), pinned);
  EXPECT_EQ(test::open_descriptors(), descriptors);
  EXPECT_FALSE(test::is_mapped(folder_.path()));
  const auto entries = fs::directory_iterator(folder_ / "saved");
  EXPECT_EQ(std::distance(entries, fs::directory_iterator()), 2) << "two checkpoints and nothing else";
  if (test::kProcessMemoryIsMeasurable) {
    EXPECT_LT(test::own_bytes() - own, 2 << 20) << "fifty saves that keep a tensor of this model each would show";
  }
}

// ---- what a resumed run goes on with
// ---------------------------------------------------------------------------------

TEST_P(CheckpointReports, ALowLossIsStillLowAfterResumingWithTheStatesWhereTheyBelong) {
  for (DType precision : {DType::f32, DType::bf16}) {
    fs::remove_all(folder_.path() / "saved");
    Config config = config_of(GetParam(), precision);
    config.hyperparameters.lr = 1e-2;
    const auto model = tiny_llama(false), other = tiny_llama(false, 99);
    Engine engine(*model, config);
    double loss = 100;
    for (int step = 0; step < 300 && loss >= 0.5; ++step) loss = one_step(engine, *model, 2);
    ASSERT_LT(loss, 0.5);
    engine.save(folder_ / "saved");
    Engine resumed(*other, config);
    resumed.load(folder_ / "saved");
    EXPECT_EQ(one_step(resumed, *other, 2), one_step(engine, *model, 2));
    const bool on_device = find_schedule(GetParam()).placement.optimizer_state == Tier::device;
    for (Tier tier : {Tier::device, Tier::pinned}) {
      const Bytes states = resumed.memory_in_use(tier)[MemoryUse::optimizer_states];
      EXPECT_EQ(states.value > 0, on_device == (tier == Tier::device)) << to_string(tier);
      EXPECT_EQ(states, engine.memory_in_use(tier)[MemoryUse::optimizer_states]);
    }
  }
}

void branches_step(Engine& engine, Branches& model, std::int64_t number) {
  const torch::Tensor x = test::input(number).to(model.a->weight.scalar_type());
  engine.backward(model.out(torch::tanh(model.a(x) + model.b(x))).to(torch::kFloat).mean(), {.last = true});
  engine.step();
}

std::shared_ptr<Branches> of_two_types() {
  const auto model = make_branches();
  model->a->to(torch::kBFloat16);
  model->b->to(torch::kBFloat16);
  return model;  // `out` stays in fp32
}

TEST_P(CheckpointReports, ACounterOfTheEngineThatLoadsIsReplacedAndFp32ParametersAreThere) {
  Config config = plain(GetParam());
  config.precision = DType::bf16;
  const auto model = of_two_types(), other = of_two_types();
  Engine engine(*model, config), resumed(*other, config);
  for (int step = 0; step < 7; ++step) branches_step(engine, *model, step);
  const fs::path saved = engine.save(folder_ / "saved");
  for (int step = 50; step < 52; ++step) branches_step(resumed, *other, step);
  resumed.load(folder_ / "saved");
  for (const std::string& name : test::trained_names(*model)) EXPECT_EQ(resumed.updates(name), 7) << name;
  branches_step(engine, *model, 7), branches_step(resumed, *other, 7);
  expect_same_state(*model, engine, resumed);
  EXPECT_EQ(resumed.save(folder_ / "again").filename(), "step-00000008");

  for (const CheckpointFile& file : read_checkpoint_manifest(saved).files) {
    const SafetensorsReader reader(saved / file.name);
    for (const std::string& name : reader.names()) {
      EXPECT_EQ(reader.tensor(name).dtype, name.starts_with("random/") ? DType::u8 : DType::f32) << name;
    }
  }
}

TEST_P(CheckpointReports, SavingChangesNothingInARunWithRandomNumbers) {
  ModelConfig shape = tiny_llama(true)->config();
  shape.family = ModelFamily::gpt2;
  shape.activation = Activation::gelu_tanh;
  shape.kv_heads = shape.heads;
  shape.embedding_dropout = shape.attention_dropout = shape.residual_dropout = 0.2;
  const auto make = [&shape] {
    const auto model = make_causal_lm(shape, 3);
    model->set_dropout_seed(4);
    model->train();
    return model;
  };
  const auto model = make(), twin = make();
  const Config config = config_of(GetParam(), DType::bf16);
  Engine engine(*model, config), never(*twin, config);
  for (int step = 0; step < 5; ++step) {
    EXPECT_EQ(one_step(engine, *model, step), one_step(never, *twin, step));
    engine.save(folder_ / "saved", {.keep = 1});
  }
  expect_same_state(*model, never, engine);
}

TEST_P(CheckpointReports, AroundAReleaseOfAllMemoryCheckpointsAreEqualAndWithinItTheyAreRefused) {
  const auto model = tiny_llama(true);
  Engine engine(*model, config_of(GetParam(), DType::bf16));
  one_step(engine, *model, 0);
  const fs::path before = engine.save(folder_ / "before");
  engine.release();
  EXPECT_THROW(engine.save(folder_ / "within"), StateError);
  EXPECT_THROW(engine.load(folder_ / "before"), StateError);
  EXPECT_FALSE(fs::exists(folder_ / "within"));
  engine.restore();
  const fs::path after = engine.save(folder_ / "after");
  EXPECT_EQ(test::read_file(before / "manifest.json"), test::read_file(after / "manifest.json"))
      << "checksums of all files among it";
}

TEST_P(CheckpointReports, AResumedRunExportsTheFolderThatTheRunExports) {
  for (DType precision : {DType::f32, DType::bf16}) {
    fs::remove_all(folder_.path() / "saved");
    const Config config = config_of(GetParam(), precision);
    const auto model = tiny_llama(false), other = tiny_llama(false, 77);
    Engine engine(*model, config), resumed(*other, config);
    one_step(engine, *model, 0);
    engine.save(folder_ / "saved");
    resumed.load(folder_ / "saved");
    for (DType type : {DType::f32, DType::bf16}) {
      std::vector<std::string> written;
      for (auto [from, of] : {std::pair(&engine, model), std::pair(&resumed, other)}) {
        const auto weights = [from = from](const std::string& name) { return from->weight(name); };
        save_causal_lm(*of, folder_ / "export", {.dtype = type, .weights = weights});
        written.push_back(test::read_file(folder_ / "export/model.safetensors"));
      }
      EXPECT_TRUE(written[0] == written[1]) << to_string(type);
    }
  }
}

}  // namespace
}  // namespace spillway
