// SPDX-License-Identifier: Apache-2.0
//
// Faults that users of offloaded training systems met in memory: frozen and tied parameters, traffic, refusals, engines
// made again and again. docs/field_reports.md says which report each test answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "support/process_memory.h"
#include "train/branches.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::Branches;
using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

class MemoryReports : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, MemoryReports, testing::ValuesIn(test::schedule_names()));

bool offloads(const std::string& schedule) {
  return find_schedule(schedule).placement.master != Tier::device;
}

void step_on_host_rows(Engine& engine, CausalLM& model, std::int64_t number) {
  const torch::Tensor tokens = [&] {
    const HostScope host;
    return (torch::arange(24).reshape({2, 12}) * (number % 5 + 1)) % 64;
  }();
  engine.backward(next_token_loss(model.forward(tokens), tokens, 24), {.last = true});
  engine.step();
}

// ---- frozen parameters ---------------------------------------------------------------------------------------------

/// Ten matrices of different shapes in a row, of which the engine is to train three.
struct Ten : torch::nn::Module {
  explicit Ten(std::vector<int> which) {
    torch::manual_seed(6);
    for (int i = 0; i < 10; ++i) {
      const torch::Tensor weight = torch::randn({20 + i, 21 + i}) / 5;
      if (std::find(which.begin(), which.end(), i) != which.end()) register_parameter(std::to_string(i), weight);
    }
  }
  torch::Tensor forward() {
    torch::Tensor x = torch::ones({1, 20});
    for (const torch::Tensor& w : parameters()) x = torch::tanh(torch::matmul(x, w));
    return x.square().mean();
  }
};

std::shared_ptr<Ten> mostly_frozen() {
  auto model = std::make_shared<Ten>(std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  for (auto& entry : model->named_parameters()) {
    entry.value().set_requires_grad(entry.key() == "2" || entry.key() == "5" || entry.key() == "9");
  }
  return model;
}

TEST_P(MemoryReports, StatesAreThoseOfTheTrainedParametersAlone) {
  const auto model = mostly_frozen();
  const Config config = plain(GetParam());
  const MemoryPlan plan = plan_memory(*model, config), alone = plan_memory(Ten({2, 5, 9}), config);
  for (Tier tier : {Tier::device, Tier::pinned}) {
    for (MemoryUse use : {MemoryUse::gradients, MemoryUse::masters, MemoryUse::optimizer_states, MemoryUse::staging}) {
      EXPECT_EQ(plan[tier][use], alone[tier][use]) << to_string(tier) << " " << to_string(use);
    }
  }
  std::map<std::string, torch::Tensor> before;
  for (const auto& entry : model->named_parameters()) before[entry.key()] = entry.value().detach().clone();
  Engine engine(*model, config);
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), plan[Tier::pinned]);
  for (int step = 0; step < 3; ++step) {
    engine.backward(model->forward(), {.last = true});
    engine.step();
  }
  for (const auto& entry : model->named_parameters()) {
    EXPECT_EQ(same_bits(before.at(entry.key()), entry.value().detach()), !entry.value().requires_grad()) << entry.key();
  }
}

TEST_P(MemoryReports, ReleaseTakesFrozenParametersOffTheDeviceToo) {
  const auto model = mostly_frozen(), twin = mostly_frozen();
  Engine engine(*model, plain(GetParam())), other(*twin, plain(GetParam()));
  const auto step = [](Engine& e, Ten& m) { e.backward(m.forward(), {.last = true}), e.step(); };
  step(engine, *model), step(other, *twin);
  engine.release();
  EXPECT_EQ(engine.memory_in_use(Tier::device), MemoryUsage{});
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), MemoryUsage{});
  engine.restore();
  EXPECT_TRUE(same_bits(model->forward().detach(), twin->forward().detach()));
  step(engine, *model), step(other, *twin);
  for (const auto& entry : twin->named_parameters()) {
    EXPECT_TRUE(same_bits(entry.value().detach(), model->named_parameters()[entry.key()].detach())) << entry.key();
  }
}

TEST_P(MemoryReports, AModelThatIsNotTrainedHasItsWeightsAlone) {
  const auto model = tiny_llama(true), reference = tiny_llama(true);
  for (torch::Tensor& p : model->parameters()) p.set_requires_grad(false);
  const Config config = tiny_config(GetParam(), 1, 4096, 1);
  Engine engine(*model, config);
  std::int64_t padded = 0;
  for (const torch::Tensor& p : model->parameters()) padded += (p.numel() + 1023) / 1024 * 1024;
  MemoryUsage expected;
  expected[MemoryUse::parameters] = Bytes{4 * padded};
  EXPECT_EQ(engine.memory_in_use(Tier::device), expected);
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), MemoryUsage{});
  EXPECT_EQ(generate_greedy(*model, {1, 2, 3}, 4), generate_greedy(*reference, {1, 2, 3}, 4));
  EXPECT_THROW(engine.backward(model->forward(torch::arange(12).reshape({1, 12})).sum()), InvalidArgument);
  EXPECT_THROW(engine.step(), StateError);
}

TEST_P(MemoryReports, SavedFoldersHoldEveryParameterWhateverIsFrozen) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / ("field_saved_" + GetParam());
  for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
    for (int frozen : {0, 1, 2}) {  // nothing, half, everything
      SCOPED_TRACE(testing::Message() << to_string(precision) << " frozen " << frozen);
      const auto model = tiny_llama(false);
      std::size_t number = 0;
      for (torch::Tensor& p : model->parameters()) p.set_requires_grad(frozen == 0 || (frozen == 1 && number++ % 2));
      Config config = tiny_config(GetParam(), 0, 4096, 1);
      config.precision = precision;
      config.loss_scale.initial = 256;
      Engine engine(*model, config);
      if (frozen < 2) step_on_host_rows(engine, *model, 1);
      engine.wait_parameters();
      std::filesystem::remove_all(folder);
      save_causal_lm(*model, folder,
                     {.dtype = DType::f32, .weights = [&](const std::string& name) { return engine.weight(name); }});
      const SafetensorsReader reader(folder);
      EXPECT_EQ(reader.names().size(), model->named_parameters().size());
      const auto again = load_causal_lm(folder);
      for (const auto& entry : model->named_parameters()) {
        ASSERT_TRUE(reader.contains(entry.key())) << entry.key();
        EXPECT_EQ(reader.tensor(entry.key()).dtype, DType::f32) << entry.key();
        const torch::Tensor exact = engine.weight(entry.key()).to(torch::kFloat);
        EXPECT_TRUE(same_bits(again->named_parameters()[entry.key()].detach(), exact)) << entry.key();
        EXPECT_TRUE(same_bits(exact.to(entry.value().scalar_type()), entry.value().detach())) << entry.key();
      }
    }
  }
  std::filesystem::remove_all(folder);
}

// ---- tied parameters -----------------------------------------------------------------------------------------------

/// An embedding and a head with a weight of its own, which may be made the embedding's at any time.
struct Tieable : torch::nn::Module {
  Tieable()
      : table(register_module("table", torch::nn::Embedding(32, 48))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(48, 32).bias(false)))) {}
  torch::Tensor forward(Engine& engine, const torch::Tensor& tokens) {
    const torch::Tensor x = torch::tanh(engine.call(table, tokens));
    return torch::nn::functional::cross_entropy(engine.call(head, x), (tokens + 1) % 32);
  }
  torch::nn::Embedding table;
  torch::nn::Linear head;
};

TEST_P(MemoryReports, AWeightTiedLateIsTrainedAsOneTiedBefore) {
  const auto train = [&](bool late, std::int64_t chunk) {
    torch::manual_seed(31);
    Tieable model;
    const auto tie = [&] { model.head->weight = model.table->weight; };
    if (!late) tie();
    Config config = plain(GetParam());
    config.chunk_elements = chunk;
    config.device.upload_bandwidth = 2e6;  // slow enough that a gate that does not wait would show
    Engine engine(model, config);
    if (late) tie();
    for (int step = 0; step < 6; ++step) {
      engine.backward(model.forward(engine, (torch::arange(10) * (step % 3 + 1)) % 32), {.last = true});
      engine.step();
    }
    EXPECT_EQ(engine.updates("table.weight"), 6);
    EXPECT_EQ(engine.updates("head.weight"), 0) << "nobody reads it any more";
    return engine.master("table.weight");
  };
  const torch::Tensor expected = train(false, 1 << 20);
  EXPECT_TRUE(same_bits(expected, train(true, 1 << 20)));
  EXPECT_TRUE(same_bits(expected, train(true, 1024)));
}

struct TwoNames : torch::nn::Module {
  explicit TwoNames(bool tied) {
    torch::manual_seed(3);
    first = register_parameter("first", torch::randn({40, 40}));
    second = register_parameter("second", tied ? first : torch::randn({40, 40}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::matmul(torch::tanh(torch::matmul(x, first)), second).square().mean();
  }
  torch::Tensor first, second;
};

TEST_P(MemoryReports, ATiedParameterHasOneStateUnderBothNames) {
  const Config config = plain(GetParam());
  const MemoryPlan tied = plan_memory(TwoNames(true), config), untied = plan_memory(TwoNames(false), config);
  std::int64_t states = 0, twice = 0;
  for (Tier tier : {Tier::device, Tier::pinned}) {
    for (MemoryUse use :
         {MemoryUse::parameters, MemoryUse::optimizer_states, MemoryUse::masters, MemoryUse::gradients}) {
      states += tied[tier][use].value;
      twice += untied[tier][use].value;
    }
  }
  EXPECT_NEAR(static_cast<double>(twice), 2.0 * static_cast<double>(states), 5000);
  TwoNames model(true);
  Engine engine(model, config);
  const torch::Tensor x = torch::sin(torch::arange(80.0F)).reshape({2, 40});
  torch::Tensor reference = model.first.detach().clone().requires_grad_();
  torch::matmul(torch::tanh(torch::matmul(x, reference)), reference).square().mean().backward();
  engine.backward(model.forward(x), {.last = true});
  EXPECT_TRUE(torch::allclose(engine.gradient("second"), reference.grad(), 1e-5, 1e-7));
  engine.step();
  EXPECT_EQ(engine.updates("first"), 1);
  EXPECT_TRUE(same_bits(engine.master("first"), engine.master("second")));
  EXPECT_TRUE(same_bits(model.first.detach(), model.second.detach()));
  EXPECT_EQ(model.first.const_data_ptr(), model.second.const_data_ptr());
}

// ---- traffic -------------------------------------------------------------------------------------------------------

TrackTotal lane(const Engine& engine, const std::string& name) {
  for (const TrackTotal& total : engine.summary().lanes) {
    if (total.name == name) return total;
  }
  return {};
}

TEST_P(MemoryReports, EachTrainedElementGoesUpOnceAStepAndDownOnceAMicroBatchInItsOwnType) {
  for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
    for (std::int64_t chunk : {1024, 4096, 1 << 20}) {
      const auto model = tiny_llama(false);
      model->parameters()[1].set_requires_grad(false);
      Config config = tiny_config(GetParam(), 0.5, chunk, 1);
      config.precision = precision;
      config.loss_scale.initial = 256;
      std::int64_t trained = 0;
      for (const torch::Tensor& p : model->parameters()) trained += p.requires_grad() ? p.numel() : 0;
      const torch::Tensor tokens = torch::arange(24).reshape({2, 12});
      Engine engine(*model, config);
      for (int step = 1; step <= 2; ++step) {
        for (int m = 0; m < 3; ++m) {
          engine.backward(next_token_loss(model->forward(tokens), tokens, 24), {.last = m == 2});
        }
        engine.step();
        engine.wait_parameters();
        const std::int64_t once = offloads(GetParam()) ? trained * size_of(precision) : 0;
        EXPECT_EQ(lane(engine, "h2d").bytes, step * once) << to_string(precision) << " chunk " << chunk;
        EXPECT_EQ(lane(engine, "d2h").bytes, step * 3 * once) << to_string(precision) << " chunk " << chunk;
      }
    }
  }
}

TEST_P(MemoryReports, TransfersAreCountedByChunksAndNotByParameters) {
  std::map<std::string, std::int64_t> expected;
  for (int count : {10, 1000}) {
    torch::nn::Module model;
    for (int i = 0; i < count; ++i) model.register_parameter(std::to_string(i), torch::ones({3}));
    Config config = plain(GetParam());
    config.chunk_elements = 1 << 20;
    config.clip_norm = 1;
    Engine engine(model, config);
    for (int step = 0; step < 2; ++step) {
      torch::Tensor loss = torch::zeros({});
      for (const torch::Tensor& p : model.parameters()) loss = loss + p.sum();
      engine.backward(loss, {.last = true});
      engine.step();
    }
    engine.wait_parameters();
    for (const char* name : {"h2d", "d2h", "cpu"}) {
      const std::int64_t ops = lane(engine, name).count;
      EXPECT_LE(ops, offloads(GetParam()) ? 2 * 3 : 0) << name << " with " << count;
      EXPECT_EQ(expected.emplace(name, ops).first->second, ops) << name;
    }
  }
}

// ---- refusals and what is left behind ------------------------------------------------------------------------------

struct Held {
  std::int64_t resident = 0, threads = 0, files = 0;
};

Held held() {
  Held out;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) out.resident = std::stoll(line.substr(6)) * 1024;
    if (line.rfind("Threads:", 0) == 0) out.threads = std::stoll(line.substr(8));
  }
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) ++out.files;
  return out;
}

TEST_P(MemoryReports, TooLittleHostMemoryIsNamedAsSuch) {
  const auto model = tiny_llama(false);
  Config config = tiny_config(GetParam(), 0, 4096, 1);
  const Bytes needed = plan_memory(*model, config)[Tier::pinned].total();
  config.host_memory = Bytes{std::max<std::int64_t>(0, needed.value - 4096)};
  if (!offloads(GetParam())) {
    const Engine engine(*model, config);  // needs none
    return;
  }
  try {
    const Engine engine(*model, config);
    FAIL() << "an engine was made";
  } catch (const OutOfMemory& error) {
    const std::string text = error.what(), complaint = text.substr(0, text.find(';'));
    EXPECT_EQ(error.requested(), needed.value);
    EXPECT_EQ(error.missing(), 4096);
    EXPECT_NE(complaint.find("pinned memory"), std::string::npos) << text;
    EXPECT_NE(complaint.find("4096 bytes"), std::string::npos) << text;
    EXPECT_EQ(complaint.find("device"), std::string::npos) << "the device has room: " << text;
  }
  config.host_memory = needed;
  const Engine engine(*model, config);
}

TEST_P(MemoryReports, APlanBeyondTheMachineIsRefusedBeforeAnythingIsTaken) {
  struct Huge : torch::nn::Module {
    Huge() { register_parameter("w", torch::zeros({1}).expand({std::int64_t{1} << 40})); }  // takes four bytes
  } model;
  Config config = plain(GetParam());
  config.chunk_elements = 1 << 30;
  const MemoryPlan plan = plan_memory(model, config);
  const Held before = held();
  try {
    const Engine engine(model, config);
    FAIL() << "an engine was made";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("this machine has"), std::string::npos) << error.what();
    EXPECT_EQ(error.requested(), (plan[Tier::device].total() + plan[Tier::pinned].total()).value);
    EXPECT_GT(error.missing(), std::int64_t{1} << 43);
  }
  EXPECT_LT(held().resident - before.resident, 8 << 20);
}

TEST_P(MemoryReports, AFailedConstructionSaysItsCauseAloneAndLeavesTheModuleAsItWas) {
  std::vector<std::string> messages;
  EngineOptions wrong;
  wrong.log = [&](LogLevel l, const std::string& text) { l == LogLevel::info ? void() : messages.push_back(text); };
  wrong.updates.push_back({[](const std::string&, const torch::Tensor&) { return false; }, [](ParameterUpdate&) {}});
  const auto model = make_branches(), untouched = make_branches();
  Config config = plain(GetParam());
  config.precision = DType::bf16;
  for (int attempt = 0; attempt < 3; ++attempt) {
    try {
      const Engine engine(*model, config, wrong);
      FAIL() << "an engine was made";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("applies to no trained parameter"), std::string::npos) << error.what();
    }
  }
  EXPECT_TRUE(messages.empty()) << messages.front();
  for (const auto& entry : untouched->named_parameters()) {
    EXPECT_TRUE(same_bits(entry.value().detach(), model->named_parameters()[entry.key()].detach())) << entry.key();
  }
  model->forward(input(1), true, true).backward();  // no hook is left
  EXPECT_TRUE(model->a->weight.grad().defined());
  const Engine engine(*model, plain(GetParam()));
}

TEST_P(MemoryReports, FiftyEnginesLeaveNothingBehind) {
  Held early;
  const auto model = tiny_llama(true);
  for (int round = 1; round <= 50; ++round) {
    {
      Engine engine(*model, tiny_config(GetParam(), 1, 4096, 2));
      step_on_host_rows(engine, *model, round);
    }
    if (round == 5) early = held();
  }
  const Held late = held();
  EXPECT_LT(test::kProcessMemoryIsMeasurable ? late.resident - early.resident : 0, 2 << 20);
  EXPECT_EQ(late.threads, early.threads);
  EXPECT_EQ(late.files, early.files);
}

}  // namespace
}  // namespace spillway
