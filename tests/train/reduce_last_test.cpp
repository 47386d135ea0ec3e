// SPDX-License-Identifier: Apache-2.0
//
// Ranks, which are threads here, that add their gradients in a step's last micro-batch only (docs/multi_gpu.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "spillway/core/error.h"
#include "support/bits.h"
#include "train/loose.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::expect_same;
using test::expect_same_states;
using test::FinalState;
using test::Loose;
using test::loose_config;
using test::MakeModel;
using test::on_thread_ranks;
using test::RunOptions;
using test::States;
using test::states_of;
using test::tiny_config;
using test::tiny_llama;
using test::train_ranks;

TEST(ReducedLast, StagesAndSchedulesEndInTheSameBits) {
  int cells = 0;
  const MakeModel make = [] { return tiny_llama(true); };
  for (int count : {2, 3}) {
    for (std::int64_t micro_batches : {1, 3}) {
      for (double clip : {0.0, 0.5}) {
        const RunOptions options{.steps = 6, .micro_batches = micro_batches};
        Config base = tiny_config("resident", clip, 1 << 20, 1);
        base.stage = 0;
        const FinalState each = train_ranks(count, make, base, options).front();
        base.reduce_last_only = true;
        const FinalState expected = train_ranks(count, make, base, options).front();
        if (micro_batches == 1) expect_same_states(each, expected);
        for (std::size_t i = 0; i < each.norms.size(); ++i)
          EXPECT_NEAR(each.norms[i], expected.norms[i], 1e-5 * each.norms[i]);
        for (int stage : {0, 1}) {
          for (const char* schedule : {"resident", "zero_offload"}) {
            SCOPED_TRACE(testing::Message() << count << " ranks, " << micro_batches << " micro-batches, clip " << clip
                                            << ", stage " << stage << ", " << schedule);
            Config config = tiny_config(schedule, clip, 4096, 1);
            config.stage = stage;
            config.reduce_last_only = true;
            config.recompute = stage == 1;
            for (const FinalState& state : train_ranks(count, make, config, options))
              expect_same_states(expected, state);
            ++cells;
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, 32);
}

// Which rank has rows in which micro-batch, the last one included, changes nothing but the numbers.
TEST(ReducedLast, WhereRanksHaveNothingInSomeMicroBatches) {
  using Weight = std::function<double(int rank, std::int64_t micro_batch)>;
  const Weight weights[] = {
      [](int rank, std::int64_t m) { return rank == 0 && m == 1 ? 0.0 : 1.0; },
      [](int rank, std::int64_t m) { return rank == 1 && m == 1 ? 0.0 : 2.0; },
      [](int rank, std::int64_t m) { return m == 1 ? 0.0 : 1.0 + rank; },
      [](int rank, std::int64_t m) { return (rank == 0) == (m == 0) ? 0.0 : 1.0; },
      [](int rank, std::int64_t) { return rank == 2 ? 1.0 : 0.0; },
  };
  for (const Weight& weight : weights) {
    const auto run = [&](const Config& config) {
      std::vector<FinalState> states(3);
      on_thread_ranks(3, [&](Communicator& ranks) {
        RunOptions options{.steps = 4, .micro_batches = 2};
        options.weight = [&](std::int64_t, std::int64_t m, std::int64_t) { return weight(ranks.rank(), m); };
        options.engine.communicator = &ranks;
        states[static_cast<std::size_t>(ranks.rank())] = test::train(tiny_llama(true), config, options);
      });
      for (const FinalState& state : states) expect_same_states(states.front(), state);
      return states.front();
    };
    Config config = tiny_config("zero_offload", 0.5, 4096, 1);
    config.stage = 1;
    const FinalState each = run(config);
    config.reduce_last_only = true;
    const FinalState last = run(config);
    EXPECT_EQ(last.statuses, std::vector<StepStatus>(4, StepStatus::updated));
    ASSERT_EQ(each.norms.size(), last.norms.size());
    for (std::size_t i = 0; i < each.norms.size(); ++i) EXPECT_NEAR(each.norms[i], last.norms[i], 1e-5 * each.norms[i]);
    Config resident = tiny_config("resident", 0.5, 1 << 20, 1);
    resident.stage = 0;
    resident.reduce_last_only = true;
    expect_same_states(last, run(resident));
    // Sums by the transport are in the order of ranks between threads.
    config.transport_sums = true;
    const FinalState summed = run(config);
    for (std::size_t i = 0; i < each.norms.size(); ++i)
      EXPECT_NEAR(each.norms[i], summed.norms[i], 1e-5 * each.norms[i]);
  }
}

TEST(ReducedLast, InFp16WithProfileReleaseAndRestore) {
  std::vector<FinalState> plain(2), stopped(2);
  for (bool stops : {false, true}) {
    on_thread_ranks(2, [&](Communicator& ranks) {
      const auto model = tiny_llama(false);
      model->to(torch::kHalf);
      Config config = tiny_config("zero_offload", 0.5, 4096, 1);
      config.precision = DType::f16;
      config.stage = 1;
      config.reduce_last_only = true;
      Engine engine(*model, config, {.communicator = &ranks});
      const auto loss = [&](std::int64_t m) {
        const torch::Tensor tokens = torch::arange(12).reshape({1, 12}) + ranks.rank() + m;
        return next_token_loss(model->forward(tokens), tokens, 12);
      };
      FinalState& state = (stops ? stopped : plain)[static_cast<std::size_t>(ranks.rank())];
      for (std::int64_t step = 0; step < 4; ++step) {
        if (stops) {
          static_cast<void>(engine.profile([&] { return loss(0); }));
          engine.release();
          engine.restore();
        }
        // Only one of the ranks says which is the last: then none is.
        for (std::int64_t m = 0; m < 2; ++m)
          engine.backward(loss(m), {.weight = 12, .last = m == 1 && (step % 2 == 0 || ranks.rank() == 0)});
        state.norms.push_back(engine.step().grad_norm);
      }
      for (const std::string& name : test::trained_names(*model)) state.masters[name] = engine.master(name);
    });
  }
  EXPECT_EQ(plain[0].norms, stopped[0].norms);
  for (const auto& [name, tensor] : plain[0].masters) {
    EXPECT_TRUE(test::same_bits(tensor, stopped[0].masters.at(name))) << name;
    EXPECT_TRUE(test::same_bits(tensor, plain[1].masters.at(name))) << name;
  }
}

TEST(ReducedLast, GradientsAreReadOnceTheRanksHaveAddedThem) {
  for (int stage : {0, 1}) {
    on_thread_ranks(2, [&](Communicator& ranks) {
      const auto model = tiny_llama(false);
      Config config = tiny_config("zero_offload", 0, 2048, 1);
      config.stage = stage;
      config.reduce_last_only = true;
      Engine engine(*model, config, {.communicator = &ranks});
      const std::string name = "model.layers.0.mlp.up_proj.weight";
      const torch::Tensor tokens = torch::arange(12).reshape({1, 12}) + ranks.rank();
      const auto backward = [&](bool last) {
        engine.backward(next_token_loss(model->forward(tokens), tokens, 12), {.weight = 12, .last = last});
      };
      backward(false);
      EXPECT_THROW(static_cast<void>(engine.gradient(name)), StateError);
      backward(true);
      const torch::Tensor gradient = engine.gradient(name);
      EXPECT_GT(gradient.abs().max().item<float>(), 0);
      engine.set_gradient(name, torch::zeros_like(gradient));
      EXPECT_EQ(engine.gradient(name).abs().max().item<float>(), 0);
      EXPECT_EQ(engine.step().status, StepStatus::updated);
      EXPECT_EQ(engine.optimizer_state(name, 0).abs().max().item<float>(), 0);
      // A step whose last backward was not announced is added in step(); the next one starts afresh.
      backward(false);
      EXPECT_EQ(engine.step().status, StepStatus::updated);
      EXPECT_GT(engine.optimizer_state(name, 0).abs().max().item<float>(), 0);
      backward(true);
      EXPECT_THROW(backward(false), StateError);  // what it would add comes too late
      EXPECT_EQ(engine.step().status, StepStatus::updated);
    });
  }
}

TEST(RankSteps, ThatAreDiscardedLeaveNothingBehindInEveryStageAndMode) {
  for (int count : {2, 3}) {
    for (int stage : {0, 1, 2}) {
      for (const bool reduce_last : {false, true}) {
        if (reduce_last && stage == 2) continue;
        for (const char* schedule : {"resident", "zero_offload"}) {
          SCOPED_TRACE(testing::Message()
                       << count << " ranks, stage " << stage << ", last " << reduce_last << schedule);
          const auto run = [&](bool discards) {
            std::mutex mutex;
            States out;
            on_thread_ranks(count, [&](Communicator& ranks) {
              Loose model({1500, 3000, 7, 2500});
              Config config = loose_config(schedule, stage);
              config.reduce_last_only = reduce_last;
              Engine engine(model, config, {.communicator = &ranks});
              const auto backward = [&](std::int64_t n, bool last) {
                const auto all = [](std::size_t) { return true; };
                engine.backward(model.loss(n + 7 * ranks.rank(), all), {.weight = n < 40 ? 2.0 : 7.0, .last = last});
              };
              for (std::int64_t step = 0; step < 4; ++step) {
                if (discards) {
                  backward(40 + step, false);
                  if (step % 2 == 0) backward(50 + step, true);
                  engine.discard_step();
                }
                backward(2 * step, false);
                backward(2 * step + 1, true);
                EXPECT_EQ(engine.step().status, StepStatus::updated);
              }
              const States states = states_of(engine, model);
              const std::scoped_lock lock(mutex);
              if (out.empty()) out = states;
              expect_same(out, states);
            });
            return out;
          };
          expect_same(run(false), run(true));
        }
      }
    }
  }
}

// ---- parameters that some ranks or micro-batches leave out ---------------------------------------------------------

// Gradients of an earlier micro-batch alone, on one rank alone, belong to the step all the same.
TEST(RankReports, ReducedLastTakesWhatOnlyAnEarlierMicroBatchUsed) {
  const std::vector<std::int64_t> sizes{1500, 3000, 700, 2500, 40};
  for (const char* schedule : {"resident", "zero_offload"}) {
    for (int stage : {0, 1}) {
      for (bool announced : {true, false}) {
        const auto train = [&](Communicator* ranks) {
          Loose model(sizes);
          Config config = loose_config(schedule, ranks == nullptr ? 0 : stage);
          config.reduce_last_only = ranks != nullptr;
          Engine engine(model, config, {.communicator = ranks});
          for (std::int64_t step = 0; step < 6; ++step) {
            // Rank r uses parameter r in the first micro-batch, 2 in both, 3 in the second; nobody the last one.
            for (std::size_t m = 0; m < 2; ++m) {
              const auto uses = [&](std::size_t i, std::size_t rank) {
                return i == 2 || (m == 0 && i == rank) || (m == 1 && i == 3);
              };
              for (std::size_t rank = 0; rank < 2; ++rank) {
                if (ranks != nullptr && static_cast<std::size_t>(ranks->rank()) != rank) continue;
                const bool last = announced && m == 1 && (ranks != nullptr || rank == 1);
                engine.backward(model.loss(step, [&](std::size_t i) { return uses(i, rank); }),
                                {.weight = 1, .last = last});
              }
            }
            EXPECT_EQ(engine.step().status, StepStatus::updated);
          }
          EXPECT_EQ(engine.updates("p4"), 0);
          return states_of(engine, model);
        };
        const States one = train(nullptr);
        std::mutex mutex;
        States first;
        on_thread_ranks(2, [&](Communicator& ranks) {
          const States states = train(&ranks);
          const std::scoped_lock lock(mutex);
          if (first.empty()) first = states;
          expect_same(first, states);
        });
        for (const auto& [name, tensor] : one)
          EXPECT_TRUE(torch::allclose(tensor.to(torch::kDouble), first.at(name).to(torch::kDouble), 1e-5, 1e-6))
              << name << ", " << schedule << ", stage " << stage << (announced ? "" : ", not announced");
      }
    }
  }
}

// What only an earlier micro-batch used says nothing about the order of the last one's gradients.
TEST(RankReports, ReducedLastWithDifferentHeadsAgreesOnOneOrder) {
  const std::vector<std::vector<std::size_t>> used{{1, 3}, {1, 2, 3}, {0, 1}};
  States each;
  for (bool reduce_last : {false, true}) {
    std::mutex mutex;
    States first;
    on_thread_ranks(3, [&](Communicator& ranks) {
      Loose model({1500, 3000, 700, 900});
      Config config = loose_config("zero_offload", 1);
      config.reduce_last_only = reduce_last;
      Engine engine(model, config, {.communicator = &ranks});
      for (std::int64_t step = 0; step < 6; ++step) {
        for (int m = 0; m < 2; ++m) {
          const auto& mine = used[static_cast<std::size_t>((ranks.rank() + step + m) % 3)];
          const auto uses = [&](std::size_t i) { return std::count(mine.begin(), mine.end(), i) > 0; };
          engine.backward(model.loss(step, uses), {.weight = 1, .last = m == 1});
        }
        EXPECT_EQ(engine.step().status, StepStatus::updated);
      }
      const States states = states_of(engine, model);
      const std::scoped_lock lock(mutex);
      if (first.empty()) first = states;
      expect_same(first, states);
    });
    if (!reduce_last) each = first;
    for (const auto& [name, tensor] : each) {
      EXPECT_TRUE(torch::allclose(tensor.to(torch::kDouble), first.at(name).to(torch::kDouble), 1e-4, 1e-5)) << name;
    }
  }
}

}  // namespace
}  // namespace spillway
