// SPDX-License-Identifier: Apache-2.0
//
// Adapters under the engine: the bits of the resident run, states for adapters only, and what is saved from masters.
// Frozen parameters: what a save through the engine gives of them.
#include "spillway/models/lora.h"

#include <gtest/gtest.h>

#include <numeric>

#include "formats/format_support.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/plan/run_plan.h"
#include "spillway/train/activations.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::FinalState;
using test::same_bits;
using test::TempFolder;
using test::tiny_config;
using test::tiny_llama;
using test::trained_names;

// Its embedding is frozen and tied to the head: as small as it is drawn, no adapter could make much of it.
std::shared_ptr<CausalLM> tiny_base() {
  const torch::NoGradGuard no_grad;
  const auto model = tiny_llama(true);
  model->named_parameters()["model.embed_tokens.weight"].mul_(25);
  return model;
}

std::shared_ptr<CausalLM> tiny_adapted(const LoraOptions& options = {.rank = 4, .targets = {"all-linear"}}) {
  const auto model = tiny_base();
  add_lora(*model, options, 3);
  model->set_dropout_seed(7);
  return model;
}

Config lora_config(const std::string& schedule, DType precision, std::int64_t chunk, double clip = 0.5) {
  Config config = tiny_config(schedule, clip, chunk, 1);
  config.precision = precision;
  config.hyperparameters.lr = 1e-2;
  config.loss_scale.initial = 1024;
  return config;
}

class LoraTraining : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, LoraTraining, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(LoraTraining, OffloadedStatesGiveTheBitsOfTheResidentRun) {
  for (const double dropout : {0.0, 0.2}) {
    const LoraOptions options{.rank = 4, .dropout = dropout, .targets = {"all-linear"}};
    for (const std::int64_t micro_batches : {1, 3}) {
      const FinalState expected = test::train(tiny_adapted(options), lora_config("resident", GetParam(), 1 << 20),
                                              {.steps = 8, .micro_batches = micro_batches});
      for (const std::int64_t chunk : {1024, 4096, 1 << 20}) {
        for (const bool recompute : {false, true}) {
          Config config = lora_config("zero_offload", GetParam(), chunk);
          config.recompute = recompute;
          test::expect_same_bits(
              expected, test::train(tiny_adapted(options), config, {.steps = 8, .micro_batches = micro_batches}));
        }
      }
    }
  }
}

TEST_P(LoraTraining, AdaptersLearnAndTheBaseStaysWhatItWas) {
  const auto model = tiny_adapted();
  const FinalState end = test::train(model, lora_config("zero_offload", GetParam(), 4096), {.steps = 60});
  const auto mean = [&](std::size_t first) {
    return std::accumulate(end.losses.begin() + static_cast<std::ptrdiff_t>(first),
                           end.losses.begin() + static_cast<std::ptrdiff_t>(first + 10), 0.0) /
           10;
  };
  EXPECT_LT(mean(50), 0.9 * mean(0));
  const auto before = tiny_adapted()->named_parameters();
  std::size_t moved = 0;
  for (const auto& [name, weight] : end.weights) {
    const torch::Tensor start = before[name].detach().to(weight.scalar_type());
    if (before[name].requires_grad()) {
      moved += same_bits(weight, start) ? 0 : 1;
    } else {
      EXPECT_TRUE(same_bits(weight, start)) << name;
    }
  }
  EXPECT_EQ(moved, end.masters.size());
  EXPECT_EQ(end.masters.size(), 2U * 2 * 7);
}

TEST_P(LoraTraining, OnlyAdaptersHaveStates) {
  const LoraOptions options{.rank = 4, .targets = {"all-linear"}};
  const auto model = tiny_adapted(options);
  const auto padded = [](const std::vector<ParameterShape>& shapes) {
    std::int64_t elements = 0;
    for (const ParameterShape& shape : shapes) elements += (shape.numel() + 1023) / 1024 * 1024;
    return elements;
  };
  const std::int64_t adapters = padded(lora_parameter_shapes(model->config(), options));
  const std::int64_t base = padded(parameter_shapes(model->config()));
  const std::int64_t width = GetParam() == DType::f32 ? 4 : 2;
  const MemoryPlan plan = plan_memory(*model, lora_config("zero_offload", GetParam(), 4096));
  EXPECT_EQ(plan[Tier::device][MemoryUse::parameters].value, (adapters + base) * width);
  const std::int64_t gap = Pool::kAlignment.value;  // after each role
  EXPECT_EQ(plan[Tier::pinned][MemoryUse::masters].value, adapters * 4 + gap);
  EXPECT_EQ(plan[Tier::pinned][MemoryUse::gradients].value, adapters * 4 + gap);
  EXPECT_EQ(plan[Tier::pinned][MemoryUse::optimizer_states].value, adapters * 8 + 2 * gap);
  for (const MemoryUse use : {MemoryUse::masters, MemoryUse::gradients, MemoryUse::optimizer_states}) {
    EXPECT_EQ(plan[Tier::device][use].value, 0);
  }
  Engine engine(*model, lora_config("zero_offload", GetParam(), 4096));
  EXPECT_EQ(engine.summary().device_peak, plan[Tier::device].total());
  EXPECT_THROW(engine.master("model.embed_tokens.weight"), InvalidArgument);
  EXPECT_THROW(merge_lora(*model), StateError) << "while it has an engine";
}

TEST_P(LoraTraining, APlanFromShapesAloneIsWhatTheRunHolds) {
  const LoraOptions options{.rank = 4, .dropout = 0.1, .targets = {"all-linear"}};
  const BatchShape batch{8, 24};
  for (const bool recompute : {false, true}) {
    Config config = lora_config("zero_offload", GetParam(), 4096);
    config.recompute = recompute;
    const auto model = tiny_adapted(options);
    const auto meta = meta_causal_lm(model->config(), GetParam());
    add_lora(*meta, options, 3);
    const Bytes activations = profile_activations(*meta, config, batch);
    const MemoryPlan plan = plan_run(planned_parameters(model->config(), config, options), config, activations).memory;
    EngineOptions engine_options;
    engine_options.activations = activations;
    Engine engine(*model, config, engine_options);
    EXPECT_EQ(engine.summary().plan[Tier::device], plan[Tier::device]);
    EXPECT_EQ(engine.summary().plan[Tier::pinned], plan[Tier::pinned]);
    torch::Tensor tokens;
    {
      const HostScope host;
      tokens = torch::arange(batch.rows * batch.tokens).view({batch.rows, batch.tokens}) % 64;
    }
    for (int step = 0; step < 2; ++step) {
      const torch::Tensor loss = next_token_loss(model->forward(tokens), tokens, tokens.numel());  // frees the logits
      engine.backward(loss, {.last = true});
      engine.step();
    }
    const Bytes held = engine.summary().device_at_peak[MemoryUse::activations];
    EXPECT_LE(held, activations);
    EXPECT_GE(static_cast<double>(held.value), 0.8 * static_cast<double>(activations.value));
  }
}

TEST_P(LoraTraining, AdaptersAreSavedFromTheirMasters) {
  const auto model = tiny_adapted();
  const Config config = lora_config("zero_offload", GetParam(), 4096);
  Engine engine(*model, config);
  const auto weights = [&](const std::string& name) { return engine.weight(name); };
  const torch::Tensor tokens = torch::arange(24).view({2, 12});
  engine.backward(next_token_loss(model->forward(tokens), tokens, 24), {.last = true});
  engine.step();
  const TempFolder folder, merged_folder;
  const HostScope host;
  save_lora(*model, folder.path(), {.dtype = DType::f32, .weights = weights});
  const auto read = tiny_base();
  load_lora(*read, folder.path());
  for (const std::string& name : trained_names(*model)) {
    EXPECT_TRUE(same_bits(read->named_parameters()[name].detach(), engine.master(name))) << name;
  }
  // The merged model: base as it was trained on, adapters from their masters, rounded once.
  save_causal_lm(*model, merged_folder.path(), {.dtype = DType::f32, .weights = weights, .merge_lora = true});
  for (auto& item : read->named_parameters()) {
    const torch::NoGradGuard no_grad;
    item.value().copy_(engine.weight(item.key()));
  }
  merge_lora(*read);
  const auto merged = load_causal_lm(merged_folder.path());
  for (const auto& item : merged->named_parameters()) {
    EXPECT_TRUE(same_bits(item.value().detach(), read->named_parameters()[item.key()].detach())) << item.key();
  }
}

TEST(LoraResume, TrainingGoesOnFromASavedAdapter) {
  const Config config = lora_config("zero_offload", DType::f32, 4096);
  const auto model = tiny_adapted();
  test::train(model, config, {.steps = 5});
  const TempFolder folder;
  save_lora(*model, folder.path());
  const auto resumed = tiny_base();
  load_lora(*resumed, folder.path());
  resumed->set_dropout_seed(7);
  test::expect_same_bits(test::train(model, config, {.steps = 5}), test::train(resumed, config, {.steps = 5}));
}

// ---- frozen parameters ---------------------------------------------------------------------------------------------

TEST_P(LoraTraining, AnExportHoldsEveryParameterInItsTypeHoweverManyAreFrozen) {
  for (const int frozen_percent : {0, 50, 100}) {
    const auto model = tiny_llama(true);
    const auto exact = tiny_llama(true)->named_parameters();
    auto parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size() * static_cast<std::size_t>(frozen_percent) / 100; ++i) {
      parameters[i].set_requires_grad(false);
    }
    Engine engine(*model, lora_config("zero_offload", GetParam(), 4096));
    const HostScope host;
    const TempFolder folder;
    save_causal_lm(*model, folder.path(),
                   {.dtype = DType::f32, .weights = [&](const std::string& name) { return engine.weight(name); }});
    const SafetensorsReader reader(folder.path());
    EXPECT_EQ(reader.names().size(), parameters.size());
    const auto read = load_causal_lm(folder.path());
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(reader.tensor(item.key()).dtype, DType::f32) << item.key();
      const torch::Tensor stored = item.value().requires_grad()
                                       ? exact[item.key()].detach()
                                       : item.value().detach().to(torch::kFloat);  // of which there is no other copy
      EXPECT_TRUE(same_bits(read->named_parameters()[item.key()].detach(), stored)) << item.key();
    }
  }
}

TEST_P(LoraTraining, NothingOfAFrozenModelStaysOnTheDeviceAfterItsEngine) {
  const auto model = tiny_adapted({.rank = 1, .targets = {"*.1.*.v_proj"}});
  const torch::Tensor tokens = torch::arange(24).view({2, 12});
  model->eval();
  const torch::NoGradGuard no_grad;
  torch::Tensor inside;
  {
    Engine engine(*model, lora_config("zero_offload", GetParam(), 4096));
    const torch::Tensor logits = model->forward(tokens);
    const HostScope host;
    inside = logits.clone();
  }
  EXPECT_TRUE(same_bits(model->forward(tokens), inside));
  Config config = lora_config("resident", GetParam(), 4096);
  config.device.memory = plan_memory(*model, config)[Tier::device].total();
  Engine again(*model, config);  // the whole device is free
  EXPECT_EQ(again.summary().device_peak, *config.device.memory);
}

TEST(Frozen, ACopyOfATrainedModelHasNoStatesAndStaysAsItIs) {
  const auto model = tiny_llama(false);
  const Config config = lora_config("zero_offload", DType::f32, 4096);
  Engine engine(*model, config);
  const TempFolder folder;
  std::shared_ptr<CausalLM> copy;
  {
    const HostScope host;
    save_causal_lm(*model, folder.path(), {.weights = [&](const std::string& name) { return engine.weight(name); }});
    copy = load_causal_lm(folder.path());
    for (torch::Tensor& parameter : copy->parameters()) parameter.set_requires_grad(false);
  }
  const MemoryPlan plan = plan_memory(*copy, config);
  EXPECT_EQ(plan[Tier::device].total(), plan[Tier::device][MemoryUse::parameters]);
  EXPECT_EQ(plan[Tier::pinned].total().value, 0);
  const torch::Tensor tokens = torch::arange(24).view({2, 12});
  const auto copied_logits = [&] {
    const torch::NoGradGuard no_grad;
    return copy->forward(tokens);
  };
  const torch::Tensor before = copied_logits();
  engine.backward(next_token_loss(model->forward(tokens), tokens, 24), {.last = true});
  engine.step();
  engine.wait_parameters();
  EXPECT_TRUE(same_bits(copied_logits(), before));
  EXPECT_FALSE(same_bits(model->forward(tokens).detach(), before)) << "the trained one has moved";
}

}  // namespace
}  // namespace spillway
