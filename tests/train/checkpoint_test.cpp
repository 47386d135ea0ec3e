// SPDX-License-Identifier: Apache-2.0
//
// A resumed run ends in the bits of the uninterrupted one, under any other placement; damage changes nothing.
#include "spillway/train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/branches.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using test::same_bits;
using test::tiny_config;

class Checkpoint : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            ("spillway_" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_;
};

std::shared_ptr<CausalLM> model_with_dropout(std::uint64_t seed) {
  ModelConfig config = test::tiny_llama(true)->config();
  config.family = ModelFamily::gpt2;
  config.activation = Activation::gelu_tanh;
  config.kv_heads = config.heads;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0.1;
  const auto model = make_causal_lm(config, seed);
  model->set_dropout_seed(4);
  model->train();
  return model;
}

void steps(CausalLM& model, Engine& engine, std::int64_t from, std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) {
    for (std::int64_t m = 0; m < 2; ++m) {
      torch::Tensor tokens;
      {
        const HostScope host;
        tokens = (torch::arange(24).reshape({2, 12}) * (step % 5 + 1) + m) % 64;
      }
      const torch::Tensor loss = next_token_loss(model.forward(tokens), tokens, 24);
      engine.backward(loss, {.weight = 3.0 + static_cast<double>(m), .last = m == 1});
    }
    engine.step();
  }
}

Config run_config(const std::string& schedule, DType precision, std::int64_t chunk, int threads) {
  Config config = tiny_config(schedule, 0.5, chunk, threads);
  config.precision = precision;
  config.loss_scale = {.initial = 512, .growth_interval = 3};
  config.lr_schedule.kind = LrScheduleConfig::Kind::cosine;
  config.lr_schedule.warmup_steps = 3;
  config.lr_schedule.total_steps = 12;
  return config;
}

void expect_same_state(CausalLM& model, Engine& expected, Engine& actual) {
  for (const std::string& name : test::trained_names(model)) {
    EXPECT_TRUE(same_bits(expected.master(name), actual.master(name))) << name;
    for (std::int64_t k : {0, 1}) {
      EXPECT_TRUE(same_bits(expected.optimizer_state(name, k), actual.optimizer_state(name, k))) << name;
    }
    EXPECT_EQ(expected.updates(name), actual.updates(name));
  }
}

TEST_F(Checkpoint, ResumesBitForBitUnderAnyOtherPlacementChunkSizeAndThreadCount) {
  for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
    fs::remove_all(root_);
    const auto whole = model_with_dropout(3);
    Engine uninterrupted(*whole, run_config("zero_offload", precision, 4096, 1));
    steps(*whole, uninterrupted, 0, 4);
    const fs::path saved = uninterrupted.save(root_, {.program = "row 17 \"of\" 40\n"});
    EXPECT_EQ(saved.filename(), "step-00000004");
    steps(*whole, uninterrupted, 4, 9);
    const std::vector<Config> others = {run_config("zero_offload", precision, 4096, 1),
                                        run_config("resident", precision, 1 << 20, 2),
                                        run_config("zero_offload", precision, 1024, 2)};
    for (const Config& other : others) {
      const auto model = model_with_dropout(99);  // other weights, until they are loaded
      Engine engine(*model, other);
      EXPECT_EQ(engine.load(root_), "row 17 \"of\" 40\n");
      steps(*model, engine, 4, 9);
      expect_same_state(*model, uninterrupted, engine);
      engine.wait_parameters();
      EXPECT_TRUE(same_bits(whole->parameters()[0].detach(), model->parameters()[0].detach()));
    }
  }
}

TEST_F(Checkpoint, OfOnePrecisionIsResumedByAnother) {
  const auto first = test::tiny_llama(true), second = test::tiny_llama(true, 77);
  Engine from(*first, run_config("zero_offload", DType::f16, 4096, 1));
  steps(*first, from, 0, 3);
  from.save(root_);
  Engine to(*second, run_config("zero_offload", DType::bf16, 4096, 1));
  to.load(root_);
  expect_same_state(*second, from, to);
}

TEST_F(Checkpoint, HoldsBuffersAndFrozenParametersThatWereWritten) {
  struct Normed : torch::nn::Module {
    Normed()
        : in(register_module("in", torch::nn::Linear(7, 9))), norm(register_module("norm", torch::nn::BatchNorm1d(9))) {
      in->bias.set_requires_grad(false);
    }
    torch::Tensor forward(const torch::Tensor& x) { return norm(in(x)).square().mean() + in(x).mean(); }
    torch::nn::Linear in;
    torch::nn::BatchNorm1d norm;
  };
  torch::manual_seed(3);
  Normed first, second;
  Engine from(first, test::plain("zero_offload")), to(second, test::plain("zero_offload"));
  for (int i = 0; i < 3; ++i) {
    from.backward(first.forward(test::input(i)), {.last = true});
    from.step();
  }
  from.set_weight("in.bias", torch::full({9}, 0.5));
  from.save(root_);
  const torch::Tensor next = torch::rand({5});
  torch::manual_seed(1000);
  to.load(root_);
  EXPECT_TRUE(same_bits(torch::rand({5}), next)) << "LibTorch's random numbers go on where they stood";
  EXPECT_TRUE(same_bits(first.norm->running_mean, second.norm->running_mean));
  EXPECT_EQ(second.norm->num_batches_tracked.item<std::int64_t>(), 3);
  EXPECT_TRUE(same_bits(second.in->bias.detach(), torch::full({9}, 0.5F)));
  EXPECT_EQ(second.norm->running_mean.scalar_type(), torch::kFloat);
}

TEST_F(Checkpoint, OnAnotherFrozenBaseIsRefused) {
  const auto run = [](const std::shared_ptr<CausalLM>& model) {
    for (auto& item : model->named_parameters()) {
      item.value().set_requires_grad(item.key().find("mlp") != std::string::npos);
    }
    return model;
  };
  const auto first = run(test::tiny_llama(false, 5)), same = run(test::tiny_llama(false, 5)),
             other = run(test::tiny_llama(false, 77));
  const Config config = run_config("zero_offload", DType::bf16, 4096, 1);
  Engine from(*first, config), to(*same, config), wrong(*other, config);
  steps(*first, from, 0, 2);
  from.save(root_);
  to.load(root_);
  expect_same_state(*same, from, to);
  const torch::Tensor before = wrong.master("model.layers.0.mlp.up_proj.weight");
  try {
    wrong.load(root_);
    FAIL() << "adapters of another base were taken";
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what()).find("frozen parameter"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(same_bits(before, wrong.master("model.layers.0.mlp.up_proj.weight")));
}

TEST_F(Checkpoint, KeepsTheNewestAndReportsItsProgress) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  Bytes last, total;
  for (int n = 0; n < 5; ++n) {
    steps(*model, engine, n, n + 1);
    engine.save(root_, {.keep = 2,
                        .progress =
                            [&](Bytes done, Bytes all) {
                              EXPECT_LE(last.value, done.value + (done.value == 0 ? last.value : 0));
                              last = done;
                              total = all;
                            },
                        .max_file = Bytes{100 * 1024}});
    EXPECT_EQ(last, total);
    last = {};
  }
  const auto kept = list_checkpoints(root_);
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[1].filename(), "step-00000005");
  EXPECT_GT(read_checkpoint_manifest(kept[1]).files.size(), 2u) << "cut into several files";
  engine.save(root_);  // the same step again
  EXPECT_EQ(list_checkpoints(root_).size(), 2u);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 2) << "nothing else is left";
}

TEST_F(Checkpoint, ThatWasJustMadeIsKeptWhateverItsNumber) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  engine.save(root_);
  steps(*model, engine, 1, 4);
  engine.save(root_);
  engine.load(root_ / "step-00000001");
  steps(*model, engine, 1, 2);
  const fs::path made = engine.save(root_, {.keep = 1});
  EXPECT_EQ(list_checkpoints(root_), std::vector<fs::path>{made});
}

TEST_F(Checkpoint, GroupNumbersThatWereChangedComeBackUnlessTheConfigurationsAreAskedFor) {
  const auto model = test::tiny_llama(true);
  EngineOptions quiet;
  quiet.log = [](LogLevel, const std::string&) {};
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1), quiet);
  steps(*model, engine, 0, 1);
  engine.set_lr(0.125, 1);
  engine.save(root_);
  const auto other = test::tiny_llama(true);
  Engine resumed(*other, run_config("resident", DType::f32, 4096, 1), quiet);
  resumed.load(root_, {.hyperparameters = false});
  EXPECT_EQ(resumed.hyperparameters(1).lr, 3e-3);
  resumed.load(root_);
  EXPECT_EQ(resumed.hyperparameters(1).lr, 0.125);
}

// ---- what is refused -----------------------------------------------------------------------------------------------

std::string refusal(Engine& engine, const fs::path& from) {
  try {
    engine.load(from);
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

TEST_F(Checkpoint, ThatIsDamagedOrOfAnotherRunIsRefusedByNameAndChangesNothing) {
  const auto model = test::tiny_llama(false);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 2);
  const fs::path saved = engine.save(root_);
  steps(*model, engine, 2, 3);
  const torch::Tensor before = engine.master("lm_head.weight");
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };

  EXPECT_TRUE(has(refusal(engine, root_ / "nowhere"), "neither a checkpoint"));
  const fs::path states = saved / "states-00001.safetensors";
  const auto size = fs::file_size(states);
  {  // one bit
    std::fstream file(states, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(size - 100));
    file.put('\x5a');
  }
  EXPECT_TRUE(has(refusal(engine, root_), "damaged"));
  fs::resize_file(states, size - 1);
  EXPECT_TRUE(has(refusal(engine, root_), "bytes long"));
  fs::remove(states);
  EXPECT_TRUE(has(refusal(engine, root_), "missing"));
  EXPECT_TRUE(same_bits(before, engine.master("lm_head.weight")));
  EXPECT_EQ(engine.updates("lm_head.weight"), 3);

  engine.save(root_);
  const auto tied = test::tiny_llama(true);
  Engine other(*tied, run_config("zero_offload", DType::f32, 4096, 1));
  EXPECT_TRUE(has(refusal(other, root_), "lm_head.weight"));
  Config adam = run_config("zero_offload", DType::f32, 4096, 1);
  adam.optimizer = OptimizerKind::adam;
  const auto third = test::tiny_llama(false);
  Engine another(*third, adam);
  EXPECT_TRUE(has(refusal(another, root_), "adamw"));
}

TEST_F(Checkpoint, ManifestsOfStrangersAreReadStrictly) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  const fs::path manifest = engine.save(root_) / "manifest.json";
  std::ifstream in(manifest);
  const std::string good((std::istreambuf_iterator<char>(in)), {});
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"\"states-00001.safetensors\"", "\"../../etc/passwd\""},
      {"\"states-00001.safetensors\"", "\".hidden\""},
      {"\"version\": 1", "\"version\": 2"},
      {"\"version\": 1", "\"version\": 18446744073709551615"},
      {"\"step\": 1", "\"step\": -1"},
      {"\"step\": 1", "\"step\": 1.5"},
      {"\"format\": \"spillway-checkpoint\"", "\"format\": \"pickle\""},
      {"\"xxh3\": \"", "\"xxh3\": \"g"},
      {"\"step\": 1", "\"step\": 1, \"step\": 2"},
      {"\"beta1\": 0.9", "\"beta1\": 1.9"},
      {"\"lr\": ", "\"lr\": -"},
      {"{", "["},
  };
  for (const auto& [from, to] : changes) {
    std::string bad = good;
    const auto at = bad.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bad.replace(at, from.size(), to);
    std::ofstream(manifest) << bad;
    EXPECT_NE(refusal(engine, root_).find("manifest.json"), std::string::npos) << to;
  }
  std::ofstream(manifest) << good;
  EXPECT_EQ(refusal(engine, root_), "");
}

TEST_F(Checkpoint, WithRandomNumbersThatAreNoneIsRefusedBeforeAnythingChanges) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  const fs::path saved = engine.save(root_), states = saved / "states-00001.safetensors";
  steps(*model, engine, 1, 2);
  const torch::Tensor before = engine.master("model.norm.weight");
  {
    std::fstream file(states, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(fs::file_size(states) - 5056));  // bytes come last
    file << std::string(5056, '\xff');
  }
  EXPECT_THROW(engine.load(root_, {.verify = false}), FileError);
  EXPECT_TRUE(same_bits(before, engine.master("model.norm.weight")));
  EXPECT_EQ(engine.updates("model.norm.weight"), 2);
}

TEST_F(Checkpoint, AProgressCallThatThrowsInALoadEndsTheEngine) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  engine.save(root_);
  const auto fail = [](Bytes, Bytes) { throw std::runtime_error("the terminal is gone"); };
  EXPECT_THROW(engine.load(root_, {.progress = fail}), std::runtime_error);
  EXPECT_THROW(steps(*model, engine, 1, 2), StateError) << "half a checkpoint is no state to train from";
}

TEST_F(Checkpoint, IsRefusedInsideAStep) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  engine.save(root_);
  const torch::Tensor tokens = torch::arange(12).reshape({1, 12});
  engine.backward(next_token_loss(model->forward(tokens), tokens, 12));
  EXPECT_THROW(engine.save(root_), StateError);
  EXPECT_THROW(engine.load(root_), StateError);
}

TEST_F(Checkpoint, ASaveThatRunsOutOfSpaceLeavesTheLastCompleteOne) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  engine.save(root_);
  steps(*model, engine, 1, 2);
  // No file may pass this size: writing fails as it does on a full disk.
  struct rlimit old {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = old;
  small.rlim_cur = 64 * 1024;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(engine.save(root_), FileError);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, handler);
  const auto left = list_checkpoints(root_);
  ASSERT_EQ(left.size(), 1u);
  check_checkpoint_files(left[0], read_checkpoint_manifest(left[0]), true);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1) << "nothing half-done is left";
  steps(*model, engine, 2, 3);  // the engine itself goes on
  engine.save(root_);
  EXPECT_EQ(list_checkpoints(root_).size(), 2u);
}

TEST_F(Checkpoint, LeftoversOfAKilledSaveAreNoCheckpointsAndAreRemovedByTheNext) {
  const auto model = test::tiny_llama(true);
  Engine engine(*model, run_config("zero_offload", DType::f32, 4096, 1));
  steps(*model, engine, 0, 1);
  std::array<char, 256> host{};
  ASSERT_EQ(gethostname(host.data(), host.size() - 1), 0);
  const auto aside = [&](const std::string& rest) { return root_ / (std::string(".saving-") + host.data() + rest); };
  // In a container the next process has the number of the one before.
  const fs::path dead = aside("-999999999-7-0");
  const fs::path earlier_run = aside("-" + std::to_string(::getpid()) + "-1-0");
  const fs::path elsewhere = root_ / ".saving-another.host-999999999-7-0", alike = aside("-4711-999999999-7-0");
  for (const fs::path& folder : {dead, earlier_run, elsewhere, alike, root_ / "step-latest",
                                 root_ / "step-00000009-old", root_ / "step-00000099"}) {
    fs::create_directories(folder);
    std::ofstream(folder / "states-00001.safetensors") << "half";
  }
  EXPECT_TRUE(list_checkpoints(root_).empty());
  engine.save(root_);
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_FALSE(fs::exists(earlier_run));
  EXPECT_TRUE(fs::exists(elsewhere)) << "its process may live";
  EXPECT_TRUE(fs::exists(alike)) << "of a host whose name goes on with a number";
  EXPECT_TRUE(fs::exists(root_ / "step-latest")) << "not ours";
  EXPECT_EQ(list_checkpoints(root_).size(), 1u);
}

}  // namespace
}  // namespace spillway
