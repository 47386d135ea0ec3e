// SPDX-License-Identifier: Apache-2.0
//
// Rows of several documents and generation, through the engine: data, memory plans, recompute.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "spillway/formats/safetensors.h"
#include "spillway/models/generate.h"
#include "spillway/plan/run_plan.h"
#include "spillway/train/activations.h"
#include "spillway/train/data_loader.h"
#include "spillway/train/engine.h"
#include "spillway/train/metrics.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

using Two = std::pair<std::int64_t, std::int64_t>;
constexpr std::int64_t kRows = 4, kLength = 12;

// Rows of two documents, the last positions padding.
std::filesystem::path packed_file() {
  std::vector<std::int32_t> tokens, documents;
  for (std::int32_t i = 0; i < kRows * (kLength + 1); ++i) {
    const std::int32_t position = i % (kLength + 1);
    tokens.push_back(i * 7 % 64);
    documents.push_back(position < 5 ? 0 : position < 11 ? 1 : -1);
  }
  const auto tensor = [](const char* name, const std::vector<std::int32_t>& values) {
    return TensorSource{name, DType::i32, {kRows, kLength + 1}, [values](std::span<std::byte> out) {
                          std::memcpy(out.data(), values.data(), out.size());
                        }};
  };
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / "spillway_packed.safetensors";
  write_safetensors(file, std::vector{tensor("tokens", tokens), tensor("documents", documents)});
  return file;
}

torch::Tensor loss_of(CausalLM& model, const Batch& batch) {
  return next_token_loss(model.forward(batch.inputs, batch.documents), batch.targets, batch.valid_targets);
}

TEST(PackedData, ReachesTheBatch) {
  const TokenFile file(packed_file(), 0);
  DataLoader loader(file, 64, {.batch_size = 3, .shuffle = false, .seed = 0});
  const Batch batch = loader.next();
  ASSERT_EQ(batch.documents.sizes(), (std::vector<std::int64_t>{3, kLength}));
  EXPECT_EQ(batch.documents.eq(0).sum().item<std::int64_t>(), 3 * 5);
  EXPECT_EQ(batch.documents.eq(-1).sum().item<std::int64_t>(), 3 * 1);
  EXPECT_EQ(batch.valid_targets, 3 * (4 + 5));
  EXPECT_TRUE(batch.targets.masked_select(batch.documents.eq(-1)).eq(-100).all().item<bool>());
}

TEST(PackedData, IsEvaluatedByDocument) {
  const TokenFile file(packed_file(), 0);
  const auto model = tiny_llama(false);
  DataLoader loader(file, 64, {.batch_size = kRows, .shuffle = false, .seed = 0});
  const Batch batch = loader.next();
  double sum = 0;
  const torch::NoGradGuard no_grad;
  for (const auto& [first, count] : std::vector<Two>{{0, 5}, {5, 6}}) {
    sum +=
        next_token_loss_sum(model->forward(batch.inputs.narrow(1, first, count)), batch.targets.narrow(1, first, count))
            .item<double>();
  }
  const double expected = sum / static_cast<double>(batch.valid_targets);
  EXPECT_NEAR(evaluate(*model, file, 2, 0), expected, 1e-5 * expected);
}

TEST(PackedData, TrainsToTheSameBitsOnEverySchedule) {
  const TokenFile file(packed_file(), 0);
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool recompute : {false, true}) {
    for (const std::string schedule : {"resident", "zero_offload"}) {
      const auto model = tiny_llama(true);
      Config config = tiny_config(schedule, 0.5, 4096, 1);
      config.recompute = recompute;
      Engine engine(*model, config);
      DataLoader loader(file, 64, {.batch_size = 2, .shuffle = true, .seed = 3});
      for (int step = 0; step < 3; ++step) {
        engine.backward(loss_of(*model, loader.next()), {.last = true});
        engine.step();
      }
      results.emplace_back();
      for (const std::string& name : test::trained_names(*model)) results.back().push_back(engine.master(name));
    }
  }
  for (std::size_t run = 1; run < results.size(); ++run) {
    for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(same_bits(results[run][i], results[0][i])) << run;
  }
}

constexpr ModelFamily kFamilies[] = {ModelFamily::gpt2, ModelFamily::llama, ModelFamily::mistral, ModelFamily::gemma2,
                                     ModelFamily::gemma3};

ModelConfig shape_of(ModelFamily family) {
  ModelConfig config = tiny_llama(true)->config();
  config.family = family;
  if (family == ModelFamily::mistral) config.sliding_window = 5;
  if (family == ModelFamily::gemma2 || family == ModelFamily::gemma3) {
    config.activation = Activation::gelu_tanh;
    config.norm_plus_one = config.branch_norms = config.scale_embedding = true;
    config.sliding_window = 5;
    config.layer_slides.assign(static_cast<std::size_t>(config.layers), false);
    config.layer_slides.front() = true;
    if (family == ModelFamily::gemma2) config.attention_softcap = config.logit_softcap = 4;
    if (family == ModelFamily::gemma3) config.sliding_rope_theta = 500;
  }
  if (family == ModelFamily::gpt2) {
    config.kv_heads = config.heads;
    config.activation = Activation::gelu_tanh;
  }
  return config;
}

// The most that `body` holds as activations, of a run whose plan allows `activations`.
template <typename Body>
Bytes measured(const ModelConfig& shape, const Config& config, Bytes activations, const Body& body) {
  const auto model = make_causal_lm(shape, 1);
  EngineOptions options;
  options.activations = activations;
  Engine engine(*model, config, options);
  body(*model, engine);
  return engine.summary().device_at_peak[MemoryUse::activations];
}

TEST(PackedData, TakesTheActivationsThatThePlanSays) {
  const TokenFile file(packed_file(), 0);
  for (const ModelFamily family : kFamilies) {
    for (const bool recompute : {false, true}) {
      Config config = tiny_config("resident", 0, 4096, 1);
      config.recompute = recompute;
      const BatchShape batch{kRows, kLength, true};
      const Bytes planned = profile_activations(*meta_causal_lm(shape_of(family)), config, batch);
      const Bytes held = measured(shape_of(family), config, planned, [&](CausalLM& model, Engine& engine) {
        DataLoader loader(file, 64, {.batch_size = kRows, .shuffle = false, .seed = 0});
        engine.backward(loss_of(model, loader.next()), {.last = true});
        engine.step();
      });
      EXPECT_LE(held.value, planned.value) << to_string(family) << (recompute ? " recomputed" : "");
      EXPECT_GE(static_cast<double>(held.value), 0.85 * static_cast<double>(planned.value)) << to_string(family);
    }
  }
}

TEST(GeneratedText, TakesNoMoreThanThePlanSays) {
  for (const ModelFamily family : kFamilies) {
    for (const DType precision : {DType::f32, DType::bf16}) {
      for (const Two& lengths : std::vector<Two>{{1, 1}, {1, 20}, {9, 12}, {20, 40}}) {
        const std::int64_t prompt = lengths.first, count = lengths.second;
        Config config = tiny_config("resident", 0, 4096, 1);
        config.precision = precision;
        const auto meta = meta_causal_lm(shape_of(family), precision);
        const Bytes planned = profile_generation(*meta, prompt, count);
        const Bytes held = measured(shape_of(family), config, planned, [&](CausalLM& model, Engine&) {
          generate_greedy(model, std::vector<std::int64_t>(static_cast<std::size_t>(prompt), 3), count);
        });
        EXPECT_LE(held.value, planned.value) << to_string(family) << " " << prompt << " " << count;
        EXPECT_GT(held.value, planned.value / 2) << to_string(family) << " " << prompt << " " << count;
      }
    }
  }
}

TEST(GeneratedText, IsTheSameOnEverySchedule) {
  std::vector<std::int64_t> expected;
  for (const std::string schedule : {"resident", "zero_offload"}) {
    const auto model = tiny_llama(true);
    const TokenFile file(packed_file(), 0);
    Engine engine(*model, tiny_config(schedule, 0.5, 4096, 1));
    DataLoader loader(file, 64, {.batch_size = 2, .shuffle = true, .seed = 3});
    engine.backward(loss_of(*model, loader.next()), {.last = true});
    engine.step();  // leaves uploads pending, which the gate waits for
    const auto text = generate(*model, {1, 2, 3}, {.max_new_tokens = 20, .temperature = 1, .seed = 5});
    if (expected.empty()) expected = text;
    EXPECT_EQ(text, expected) << schedule;
  }
}

}  // namespace
}  // namespace spillway
