// SPDX-License-Identifier: Apache-2.0
//
// Promise 1: placement never changes the numbers. Every schedule ends in the bits of the resident run.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::expect_same_bits;
using test::FinalState;
using test::RunOptions;
using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

// Smaller than most parameters, across parameters, and larger than the model.
constexpr std::int64_t kChunkSizes[] = {1024, 7 * 1024, 1 << 20};

TEST(Placement, ZeroOffloadEqualsResidentBitForBitInEveryCell) {
  int cells = 0;
  for (bool tied : {true, false}) {
    for (std::int64_t micro_batches : {1, 3}) {
      for (double clip : {0.0, 0.5}) {
        const RunOptions options{.micro_batches = micro_batches};
        const FinalState expected = test::train(tiny_llama(tied), tiny_config("resident", clip, 1 << 20, 1), options);
        for (std::int64_t chunk : kChunkSizes) {
          for (int threads : {1, 2}) {
            SCOPED_TRACE(testing::Message() << "tied " << tied << " micro-batches " << micro_batches << " clip " << clip
                                            << " chunk " << chunk << " threads " << threads);
            expect_same_bits(expected,
                             test::train(tiny_llama(tied), tiny_config("zero_offload", clip, chunk, threads), options));
            ++cells;
          }
        }
        expect_same_bits(expected, test::train(tiny_llama(tied), tiny_config("resident", clip, 1024, 2), options));
      }
    }
  }
  EXPECT_EQ(cells, 48);
}

TEST(Placement, ClippingInTheseRunsTakesEffect) {
  // Else the cells with clipping would show nothing.
  const FinalState clipped = test::train(tiny_llama(false), tiny_config("resident", 0.5, 1 << 20, 1), {});
  const FinalState free = test::train(tiny_llama(false), tiny_config("resident", 0, 1 << 20, 1), {});
  EXPECT_GT(clipped.norms.front(), 0.5);
  EXPECT_FALSE(same_bits(clipped.masters.begin()->second, free.masters.begin()->second));
  EXPECT_LT(clipped.losses.back(), clipped.losses.front());
}

TEST(Placement, DelaysInEveryLaneChangeNoBit) {
  const RunOptions plain{.steps = 6, .micro_batches = 2};
  const FinalState expected = test::train(tiny_llama(true), tiny_config("resident", 0.5, 1 << 20, 1), plain);
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    RunOptions delayed = plain;
    delayed.engine.delay = [seed](const std::string&, const Op&) {
      thread_local std::mt19937 random(seed * 977 +
                                       static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    };
    Config config = tiny_config("zero_offload", 0.5, 2048, 2);
    config.staging_slots = 1 + seed % 3;
    expect_same_bits(expected, test::train(tiny_llama(true), config, delayed));
  }
}

TEST(Placement, AMicroBatchOfWeightZeroContributesNothingNotEvenANan) {
  for (const char* schedule : {"resident", "zero_offload"}) {
    SCOPED_TRACE(schedule);
    const auto weight = [](std::int64_t, std::int64_t m, std::int64_t targets) {
      return m == 1 ? 0.0 : static_cast<double>(targets);
    };
    const RunOptions with{.steps = 4, .micro_batches = 3, .weight = weight};
    const FinalState expected = test::train(tiny_llama(false), tiny_config("resident", 0.5, 1 << 20, 1), with);
    expect_same_bits(expected, test::train(tiny_llama(false), tiny_config(schedule, 0.5, 4096, 2), with));

    const auto model = tiny_llama(false);
    Engine engine(*model, tiny_config(schedule, 0.5, 4096, 1));
    const torch::Tensor before = engine.master("lm_head.weight");
    const torch::Tensor tokens = torch::arange(12).reshape({1, 12});
    const torch::Tensor loss = next_token_loss(model->forward(tokens), tokens, 12);
    engine.backward(loss * std::nan(""), {.weight = 0, .last = true});
    EXPECT_EQ(engine.step().status, StepStatus::empty);
    EXPECT_TRUE(same_bits(before, engine.master("lm_head.weight")));
  }
}

}  // namespace
}  // namespace spillway
