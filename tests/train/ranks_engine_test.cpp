// SPDX-License-Identifier: Apache-2.0
//
// Engines of several ranks, which are threads here: placement and stage change no bit, ranks may have nothing to do.
#include <gtest/gtest.h>

#include <mutex>

#include "spillway/core/error.h"
#include "support/bits.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::expect_same_bits;
using test::expect_same_states;
using test::FinalState;
using test::MakeModel;
using test::on_thread_ranks;
using test::RunOptions;
using test::tiny_config;
using test::tiny_llama;
using test::train_ranks;

TEST(Ranks, StagesAndSchedulesEndInTheBitsOfTheResidentRun) {
  int cells = 0;
  for (int count : {2, 3}) {
    for (std::int64_t micro_batches : {1, 3}) {
      for (double clip : {0.0, 0.5}) {
        const RunOptions options{.steps = 6, .micro_batches = micro_batches};
        const MakeModel make = [] { return tiny_llama(true); };
        Config base = tiny_config("resident", clip, 1 << 20, 1);
        base.stage = 0;
        const FinalState expected = train_ranks(count, make, base, options).front();
        for (int stage : {0, 1, 2}) {
          for (const char* schedule : {"resident", "zero_offload"}) {
            SCOPED_TRACE(testing::Message() << count << " ranks, " << micro_batches << " micro-batches, clip " << clip
                                            << ", stage " << stage << ", " << schedule);
            Config config = tiny_config(schedule, clip, 4096, 1);
            config.stage = stage;
            for (const FinalState& state : train_ranks(count, make, config, options))
              expect_same_states(expected, state);
            ++cells;
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, 48);
}

TEST(Ranks, SixteenBitTypesBucketsAndFrozenParametersToo) {
  for (DType precision : {DType::bf16, DType::f16}) {
    const MakeModel make = [] {
      auto model = tiny_llama(false);
      for (auto& entry : model->named_parameters()) {
        if (entry.key().find("layers.0") != std::string::npos) entry.value().set_requires_grad(false);
      }
      return model;
    };
    const RunOptions options{.steps = 4, .micro_batches = 2};
    Config base = tiny_config("resident", 0.5, 1 << 20, 1);
    base.precision = precision;
    base.stage = 0;
    const FinalState expected = train_ranks(2, make, base, options).front();
    Config config = tiny_config("zero_offload", 0.5, 2048, 2);
    config.precision = precision;
    config.bucket_chunks = 2;
    for (const FinalState& state : train_ranks(2, make, config, options)) expect_same_states(expected, state);
  }
}

TEST(Ranks, RecomputedBlocksGiveTheSameBitsThroughOneSlot) {
  for (bool tied : {true, false}) {
    const MakeModel make = [tied] { return tiny_llama(tied); };
    const RunOptions options{.steps = 4, .micro_batches = 2};
    Config base = tiny_config("resident", 0.5, 1 << 20, 1);
    base.stage = 0;
    const FinalState expected = train_ranks(2, make, base, options).front();
    Config config = tiny_config("zero_offload", 0.5, 1024, 1);
    config.recompute = true;
    config.staging_slots = 1;
    for (const FinalState& state : train_ranks(2, make, config, options)) expect_same_states(expected, state);
  }
}

TEST(Ranks, SumsByTheTransportAreCloseAndReported) {
  std::mutex mutex;
  std::string said;
  RunOptions options{.steps = 4, .micro_batches = 2};
  options.engine.log = [&](LogLevel, const std::string& text) {
    const std::scoped_lock lock(mutex);
    said += text;
  };
  for (int stage : {0, 2}) {
    Config config = tiny_config("zero_offload", 0.5, 3000, 1);
    config.stage = stage;
    const MakeModel make = [] { return tiny_llama(false); };
    const FinalState ordered = train_ranks(3, make, config, options).front();
    EXPECT_EQ(said.find("are summed by threads in fp32"), std::string::npos);
    config.transport_sums = true;
    const FinalState summed = train_ranks(3, make, config, options).front();
    EXPECT_NE(said.find("are summed by threads in fp32"), std::string::npos) << said;
    said.clear();
    for (std::size_t i = 0; i < ordered.norms.size(); ++i)
      EXPECT_NEAR(summed.norms[i], ordered.norms[i], 1e-5 * ordered.norms[i]);
  }
}

TEST(Ranks, OneRankIsTheRunWithoutRanks) {
  const Config config = tiny_config("zero_offload", 0.5, 4096, 1);
  const FinalState expected = test::train(tiny_llama(false), config, {.steps = 4});
  const auto states = train_ranks(1, [] { return tiny_llama(false); }, config, {.steps = 4});
  expect_same_bits(expected, states.front());
}

// The mean over valid targets of all ranks: a rank whose rows count for nothing changes nothing.
TEST(Ranks, ARankOfWeightZeroLeavesTheOthersMean) {
  const auto weight_of = [](int rank) {
    return [rank](std::int64_t, std::int64_t, std::int64_t targets) {
      return rank == 1 ? 0.0 : static_cast<double>(targets);
    };
  };
  for (int stage : {0, 2}) {
    std::vector<FinalState> states(2);
    Config config = tiny_config("zero_offload", 0.5, 4096, 1);
    config.stage = stage;
    on_thread_ranks(2, [&](Communicator& ranks) {
      RunOptions options{.steps = 4, .weight = weight_of(ranks.rank())};
      options.engine.communicator = &ranks;
      states[static_cast<std::size_t>(ranks.rank())] = test::train(tiny_llama(false), config, options);
    });
    expect_same_states(states[0], states[1]);
    // One rank alone sees rows 0, 2, 4, ... as rank 0 of two does; here it asks for the same rows.
    std::mutex mutex;
    EXPECT_EQ(states[0].statuses, std::vector<StepStatus>(4, StepStatus::updated));
  }
}

TEST(Ranks, ARankWithoutDataTakesPartWithAnUndefinedLoss) {
  on_thread_ranks(2, [](Communicator& ranks) {
    const auto model = tiny_llama(false);
    Engine engine(*model, tiny_config("zero_offload", 0, 4096, 1), {.communicator = &ranks});
    const torch::Tensor tokens = torch::arange(12).reshape({1, 12});
    for (bool all : {false, true}) {
      const bool mine = ranks.rank() == 0 && !all;
      const torch::Tensor loss = mine ? next_token_loss(model->forward(tokens), tokens, 12) : torch::Tensor();
      engine.backward(loss, {.weight = mine ? 12.0 : 0.0, .last = true});
      EXPECT_EQ(engine.step().status, all ? StepStatus::empty : StepStatus::updated);
    }
    EXPECT_FALSE(engine.all_ranks(ranks.rank() == 0));
    EXPECT_TRUE(engine.all_ranks(true));
    EXPECT_EQ(engine.mean_over_ranks(ranks.rank() == 0 ? 4 : 1, ranks.rank() == 0 ? 1 : 2), 2);
  });
}

TEST(Ranks, OtherWeightsOnARankAreRefusedByName) {
  try {
    on_thread_ranks(2, [](Communicator& ranks) {
      const auto model = tiny_llama(false, 5 + static_cast<std::uint64_t>(ranks.rank()));
      Engine engine(*model, tiny_config("zero_offload", 0, 4096, 1), {.communicator = &ranks});
    });
    FAIL() << "ranks with other weights trained together";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("embed_tokens.weight has other values on rank 1"), std::string::npos)
        << error.what();
  }
}

TEST(Ranks, AnErrorOnOneRankEndsTheOthersAndTheEngine) {
  std::vector<std::string> errors(2);
  on_thread_ranks(2, [&](Communicator& ranks) {
    const auto model = tiny_llama(false);
    Engine engine(*model, tiny_config("zero_offload", 0, 4096, 1), {.communicator = &ranks});
    const torch::Tensor tokens = torch::arange(12).reshape({1, 12});
    const torch::Tensor loss = next_token_loss(model->forward(tokens), tokens, 12);
    const double weight = ranks.rank() == 1 ? -1 : 1;
    try {
      engine.backward(loss, {.weight = weight, .last = true});
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(ranks.rank())] = error.what();
    }
    EXPECT_THROW(engine.step(), StateError);
  });
  EXPECT_NE(errors[1].find("weight is -1"), std::string::npos) << errors[1];
  EXPECT_NE(errors[0].find("weight is -1"), std::string::npos) << errors[0];  // rank 0 learns why
}

// ---- gradients, states, memory -------------------------------------------------------------------------------------

TEST(Ranks, GradientsAndStatesAreReadAndSetOnAllRanks) {
  on_thread_ranks(3, [](Communicator& ranks) {
    const auto model = tiny_llama(false);
    Engine engine(*model, tiny_config("zero_offload", 0, 2048, 1), {.communicator = &ranks});
    const std::string name = "model.layers.0.mlp.up_proj.weight";
    const torch::Tensor tokens = torch::arange(12).reshape({1, 12}) + ranks.rank();
    engine.backward(next_token_loss(model->forward(tokens), tokens, 12), {.weight = 12, .last = true});
    const torch::Tensor gradient = engine.gradient(name);
    EXPECT_GT(gradient.abs().max().item<float>(), 0);
    engine.set_gradient(name, torch::zeros_like(gradient));
    EXPECT_EQ(engine.gradient(name).abs().max().item<float>(), 0);
    engine.set_weight(name, torch::full_like(gradient, 0.25));
    EXPECT_TRUE(test::same_bits(engine.master(name), torch::full_like(gradient, 0.25)));
    EXPECT_TRUE(test::same_bits(model->named_parameters()[name].detach(), torch::full_like(gradient, 0.25)));
    engine.set_optimizer_state(name, 1, torch::full_like(gradient, 2));
    EXPECT_TRUE(test::same_bits(engine.optimizer_state(name, 1), torch::full_like(gradient, 2)));
    EXPECT_EQ(engine.step().status, StepStatus::updated);
  });
}

// Shards of other ranks may still be on their way, also where masters are on the device.
TEST(Ranks, AWriteBeforeNewWeightsHaveComeIsFoundOut) {
  for (const char* schedule : {"resident", "zero_offload"}) {
    on_thread_ranks(2, [&](Communicator& ranks) {
      const auto model = tiny_llama(false);
      Config config = tiny_config(schedule, 0, 2048, 1);
      config.stage = 1;
      Engine engine(*model, config, {.communicator = &ranks});
      const torch::Tensor tokens = torch::arange(12).reshape({1, 12}) + ranks.rank();
      const auto step = [&] {
        engine.backward(next_token_loss(model->forward(tokens), tokens, 12), {.weight = 12, .last = true});
        engine.step();
      };
      step();
      {
        const torch::NoGradGuard no_grad;
        for (torch::Tensor& parameter : model->parameters()) parameter.mul_(0.5);
      }
      EXPECT_THROW(step(), StateError);
    });
  }
}

TEST(Ranks, EachKeepsItsShareOfTheStates) {
  for (int count : {2, 3, 4}) {
    for (int row : {0, 1, 2, 3, 4}) {
      const int stage = row % 3;
      const bool reduce_last = row >= 3;
      std::mutex mutex;
      Bytes masters, gradients;
      on_thread_ranks(count, [&](Communicator& ranks) {
        const auto model = tiny_llama(false);
        Config config = tiny_config("zero_offload", 0, 4096, 1);
        config.stage = stage;
        config.reduce_last_only = reduce_last;
        Engine engine(*model, config, {.communicator = &ranks});
        const MemoryPlan plan = engine.summary().plan;
        EXPECT_EQ(engine.memory_in_use(Tier::pinned).total(), plan[Tier::pinned].total());
        const std::scoped_lock lock(mutex);
        masters += plan[Tier::pinned][MemoryUse::masters];
        gradients += plan[Tier::pinned][MemoryUse::gradients];
      });
      std::int64_t padded = 0;
      for (const torch::Tensor& parameter : tiny_llama(false)->parameters())
        padded += (parameter.numel() + 1023) / 1024 * 1024;
      const std::int64_t copies = stage == 0 ? count : 1;
      EXPECT_EQ(masters.value, copies * padded * 4 + count * Pool::kAlignment.value)
          << count << " ranks, stage " << stage;
      const std::int64_t sums = stage == 0 || reduce_last ? count : 1;
      EXPECT_EQ(gradients.value, sums * padded * 4 + count * Pool::kAlignment.value)
          << count << " ranks, stage " << stage << (reduce_last ? ", reduced last" : "");
    }
  }
}

TEST(Ranks, OwnUpdateRulesNeedWholeStates) {
  EngineOptions options;
  options.updates.push_back({[](const std::string&, const torch::Tensor&) { return true; }, [](ParameterUpdate&) {}});
  for (int stage : {0, 1}) {
    Config config = tiny_config("zero_offload", 0, 4096, 1);
    config.stage = stage;
    const auto make_engines = [&] {
      on_thread_ranks(2, [&](Communicator& ranks) {
        EngineOptions own = options;
        own.communicator = &ranks;
        const auto model = tiny_llama(false);
        Engine engine(*model, config, own);
      });
    };
    if (stage == 0) {
      EXPECT_NO_THROW(make_engines());
    } else {
      EXPECT_THROW(make_engines(), std::exception);
    }
  }
}

}  // namespace
}  // namespace spillway
