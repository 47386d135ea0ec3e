// SPDX-License-Identifier: Apache-2.0
//
// Faults that users of such systems met with several ranks (docs/field_reports.md), tried here.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>

#include "spillway/core/error.h"
#include "spillway/models/lora.h"
#include "support/bits.h"
#include "support/scratch.h"
#include "train/loose.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::expect_same;
using test::Loose;
using test::loose_config;
using test::on_thread_ranks;
using test::States;
using test::states_of;
using test::tiny_config;

// Every rank has the same rows, so that the mean is the value of each: five steps equal one rank's, bit for bit where
// the sum of equal numbers is exact (two ranks).
TEST(RankReports, ParametersSmallerThanTheNumberOfRanksTrainAsOnOne) {
  for (const auto& sizes : {std::vector<std::int64_t>{1}, {1, 3, 5000, 1}, {8, 0, 24}, {0, 8}, {8, 0}}) {
    for (const char* schedule : {"resident", "zero_offload"}) {
      States expected;
      const std::filesystem::path root = test::scratch("small_parameters");
      const auto train = [&](Communicator& ranks, int stage) {
        Loose model(sizes);
        Engine engine(model, loose_config(schedule, stage), {.communicator = &ranks});
        for (std::int64_t step = 0; step < 5; ++step) {
          engine.backward(model.loss(step, [](std::size_t) { return true; }), {.weight = 1, .last = true});
          EXPECT_EQ(engine.step().status, StepStatus::updated);
        }
        const States states = states_of(engine, model);
        if (ranks.size() == 1) {
          expected = states;
        } else if (ranks.size() == 2) {
          expect_same(expected, states);
          // Saved and loaded too.
          const std::filesystem::path saved = engine.save(root);
          Loose other(sizes);
          for (const torch::Tensor& parameter : other.parameters()) parameter.detach().zero_();
          Engine again(other, loose_config(schedule, 2 - stage), {.communicator = &ranks});
          again.load(saved);
          expect_same(expected, states_of(again, other));
        } else {
          for (const auto& [name, tensor] : expected) EXPECT_TRUE(torch::allclose(tensor, states.at(name), 1e-5, 1e-6));
        }
      };
      on_thread_ranks(1, [&](Communicator& ranks) { train(ranks, 2); });
      for (int count : {2, 4, 8}) {
        for (int stage : {0, 2}) on_thread_ranks(count, [&](Communicator& ranks) { train(ranks, stage); });
      }
    }
  }
}

TEST(RankReports, ManyRanksShareAFewGrainsAndPaddingIsCountedNowhere) {
  constexpr int kRanks = 768;
  std::int64_t kept = 0, elements = 0, without = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Layout layout({{"w", {266240 - 7}, 0}}, 1 << 20, {kRanks, rank, 2});
    kept += layout.kept_elements();
    for (const Segment& segment : layout.kept_segments()) elements += segment.count;
    without += layout.kept_segments().empty();
  }
  EXPECT_EQ(kept, 266240);
  EXPECT_EQ(elements, 266240 - 7);
  EXPECT_EQ(without, kRanks - 260);
}

TEST(RankReports, RanksThatUseDifferentHalvesOfTheModelGoOn) {
  const std::vector<std::int64_t> sizes{1500, 3000, 700, 2500};
  for (int stage : {0, 1, 2}) {
    for (std::int64_t slots : {1, 3}) {
      std::mutex mutex;
      States first;
      on_thread_ranks(2, [&](Communicator& ranks) {
        Loose model(sizes);
        Config config = loose_config("zero_offload", stage);
        config.staging_slots = slots;
        Engine engine(model, config, {.communicator = &ranks});
        for (std::int64_t step = 0; step < 20; ++step) {
          const std::size_t half = (static_cast<std::size_t>(ranks.rank() + step)) % 2;
          engine.backward(model.loss(step, [&](std::size_t i) { return i % 2 == half; }), {.weight = 1, .last = true});
          EXPECT_EQ(engine.step().status, StepStatus::updated);
        }
        const States states = states_of(engine, model);
        const std::scoped_lock lock(mutex);
        if (first.empty()) first = states;
        expect_same(first, states);
      });
      // One process that computes the same mean: half of the gradient of all.
      Loose model(sizes);
      Engine engine(model, loose_config("resident", 0));
      for (std::int64_t step = 0; step < 20; ++step) {
        engine.backward(model.loss(step, [](std::size_t) { return true; }) * 0.5, {.weight = 1, .last = true});
        engine.step();
      }
      expect_same(states_of(engine, model), first);
    }
  }
}

TEST(RankReports, RanksWithDifferentHeadsAgreeOnOneOrder) {
  // Gradients come from the last parameter to the first: [2, 0], [1, 0] and [2, 1, 0].
  const std::vector<std::vector<std::size_t>> used{{0, 2}, {0, 1}, {0, 1, 2}};
  std::mutex mutex;
  States first;
  on_thread_ranks(3, [&](Communicator& ranks) {
    Loose model({1500, 3000, 700});
    Engine engine(model, loose_config("zero_offload", 2), {.communicator = &ranks});
    for (std::int64_t step = 0; step < 6; ++step) {
      const auto& mine = used[static_cast<std::size_t>((ranks.rank() + step) % 3)];
      const auto uses = [&](std::size_t i) { return std::count(mine.begin(), mine.end(), i) > 0; };
      engine.backward(model.loss(step, uses), {.weight = 1, .last = true});
      EXPECT_EQ(engine.step().status, StepStatus::updated);
    }
    const States states = states_of(engine, model);
    const std::scoped_lock lock(mutex);
    if (first.empty()) first = states;
    expect_same(first, states);
  });
}

TEST(RankReports, AWeightThatIsSetWhileParametersAreGatheredStays) {
  on_thread_ranks(3, [](Communicator& ranks) {
    Loose model({5000, 3, 2000});  // of the second one two ranks keep nothing
    EngineOptions options{.communicator = &ranks};
    options.delay = [](const std::string&, const Op& op) {
      if (std::string(op.name) == "gather parameters") std::this_thread::sleep_for(std::chrono::milliseconds(5));
    };
    Engine engine(model, loose_config("zero_offload", 2), options);
    for (std::int64_t step = 0; step < 3; ++step) {
      engine.backward(model.loss(step, [](std::size_t) { return true; }), {.weight = 1, .last = true});
      EXPECT_EQ(engine.step().status, StepStatus::updated);
      const torch::Tensor value = torch::full({3}, 0.25 + static_cast<double>(step));
      engine.set_weight("p1", value);
      engine.wait_parameters();
      const HostScope host;
      EXPECT_TRUE(test::same_bits(model.all[1].detach(), value)) << "rank " << ranks.rank();
    }
  });
}

TEST(RankReports, ProfileReleaseAndRestoreGoOnWhereTheyWere) {
  States expected;
  for (bool between : {false, true}) {
    on_thread_ranks(3, [&](Communicator& ranks) {
      Loose model({5000, 3, 2000});
      Engine engine(model, loose_config("zero_offload", 2), {.communicator = &ranks});
      const auto loss = [&](std::int64_t step) { return model.loss(step, [](std::size_t) { return true; }); };
      for (std::int64_t step = 0; step < 4; ++step) {
        if (between) {
          engine.profile([&] { return loss(step); });
          engine.release();
          engine.restore();
        }
        engine.backward(loss(step), {.weight = 1, .last = true});
        EXPECT_EQ(engine.step().status, StepStatus::updated);
      }
      const States states = states_of(engine, model);
      if (between) {
        expect_same(expected, states);
      } else if (ranks.rank() == 0) {
        expected = states;
      }
    });
  }
}

TEST(RankReports, OtherSettingsOnARankAreRefusedByItsNumber) {
  try {
    on_thread_ranks(2, [](Communicator& ranks) {
      Loose model({3000});
      Config config = loose_config("zero_offload", 2);
      config.hyperparameters.lr *= 1 + ranks.rank();
      const Engine engine(model, config, {.communicator = &ranks});
    });
    FAIL() << "ranks with other learning rates trained together";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 has another configuration"), std::string::npos) << error.what();
  }
}

TEST(RankReports, EvaluationWithUnevenNumbersOfBatchesNeedsNoOtherRank) {
  on_thread_ranks(4, [](Communicator& ranks) {
    const auto model = test::tiny_llama(false);
    Engine engine(*model, tiny_config("zero_offload", 0, 4096, 1), {.communicator = &ranks});
    const torch::Tensor tokens = torch::arange(12).reshape({1, 12});
    for (int step = 0; step < 2; ++step) {
      engine.backward(next_token_loss(model->forward(tokens), tokens, 12), {.weight = 12, .last = true});
      EXPECT_EQ(engine.step().status, StepStatus::updated);
      const torch::NoGradGuard no_grad;
      const int batches[] = {3, 2, 2, 0};
      for (int i = 0; i < batches[ranks.rank()]; ++i) EXPECT_TRUE(model->forward(tokens).isfinite().all().item<bool>());
    }
  });
}

TEST(RankReports, ASaveOnOneRankAloneIsNamedOnBoth) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "save_on_one_rank";
  std::vector<std::string> errors(2);
  on_thread_ranks(2,
                  [&](Communicator& ranks) {
                    Loose model({3000});
                    Engine engine(model, loose_config("zero_offload", 2), {.communicator = &ranks});
                    try {
                      if (ranks.rank() == 0) engine.save(root);
                      engine.backward(model.loss(0, [](std::size_t) { return true; }), {.weight = 1, .last = true});
                    } catch (const std::exception& error) {
                      errors[static_cast<std::size_t>(ranks.rank())] = error.what();
                    }
                  },
                  {.timeout = {5}});
  for (const std::string& error : errors) EXPECT_NE(error.find("save: where"), std::string::npos) << error;
  EXPECT_TRUE(list_checkpoints(root).empty());
  std::filesystem::remove_all(root);
}

TEST(RankReports, StatesOfOddSizesGoOnUnderAnyNumberOfRanks) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "odd_states";
  const std::vector<std::int64_t> sizes{1, 1023, 1025, 7, 4097, 2};
  std::filesystem::remove_all(root);
  const auto all = [](std::size_t) { return true; };
  const auto step_of = [&](Loose& model, Engine& engine, std::int64_t step) {
    engine.backward(model.loss(step, all), {.weight = 1, .last = true});
    EXPECT_EQ(engine.step().status, StepStatus::updated);
  };
  States saved, later;
  on_thread_ranks(4, [&](Communicator& ranks) {
    Loose model(sizes);
    Engine engine(model, loose_config("zero_offload", 2), {.communicator = &ranks});
    for (std::int64_t step = 0; step < 3; ++step) step_of(model, engine, step);
    engine.save(root);
    const States at_save = states_of(engine, model);
    for (std::int64_t step = 3; step < 8; ++step) step_of(model, engine, step);
    const States after = states_of(engine, model);
    if (ranks.rank() == 0) {
      saved = at_save;
      later = after;
    }
  });
  for (int count : {1, 2, 3, 4, 6}) {
    on_thread_ranks(count, [&](Communicator& ranks) {
      Loose model(sizes);
      Engine engine(model, loose_config(count % 2 == 0 ? "resident" : "zero_offload", count % 3),
                    {.communicator = &ranks});
      engine.load(root);
      expect_same(saved, states_of(engine, model));
      for (std::int64_t step = 3; step < 8; ++step) step_of(model, engine, step);
      for (const auto& [name, tensor] : states_of(engine, model)) {
        EXPECT_TRUE(torch::allclose(tensor, later.at(name), 1e-6, 1e-7)) << count << " ranks: " << name;
      }
    });
  }
  std::filesystem::remove_all(root);
}

TEST(RankReports, AdaptersTrainOnEveryRankAndAreSavedWhole) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "rank_adapters";
  std::filesystem::remove_all(folder);
  std::mutex mutex;
  States first;
  on_thread_ranks(3, [&](Communicator& ranks) {
    const auto model = test::tiny_llama(false);
    add_lora(*model, {.rank = 4, .alpha = 8, .targets = {"q_proj", "v_proj"}}, 1);
    Engine engine(*model, tiny_config("zero_offload", 0, 1024, 1), {.communicator = &ranks});
    const States before = states_of(engine, *model);
    const torch::Tensor tokens = torch::arange(12).reshape({1, 12}) + ranks.rank();
    for (int step = 0; step < 2; ++step) {  // B is zero at first, so A moves in the second step
      engine.backward(next_token_loss(model->forward(tokens), tokens, 12), {.weight = 12, .last = true});
      EXPECT_EQ(engine.step().status, StepStatus::updated);
    }
    const States after = states_of(engine, *model);
    for (const std::string& name : test::trained_names(*model))
      EXPECT_FALSE(torch::equal(before.at(name), after.at(name))) << name;
    const auto weights = [&](const std::string& name) { return engine.weight(name); };
    save_lora(*model, folder, {.dtype = DType::f32, .weights = weights, .write = ranks.rank() == 0});
    const std::scoped_lock lock(mutex);
    if (first.empty()) first = after;
    expect_same(first, after);
  });
  const auto model = test::tiny_llama(false);
  load_lora(*model, folder);
  std::size_t compared = 0;
  for (const auto& entry : model->named_parameters()) {
    if (!entry.value().requires_grad()) continue;
    EXPECT_TRUE(test::same_bits(entry.value().detach(), first.at(entry.key()))) << entry.key();
    ++compared;
  }
  EXPECT_EQ(compared, 8U);
  std::filesystem::remove_all(folder);
}

// A rank that stops in the middle of a backward.
TEST(RankReports, ARankThatStopsInBackwardIsNamedWithItsOperation) {
  std::vector<std::string> errors(4);
  const auto begin = std::chrono::steady_clock::now();
  on_thread_ranks(4,
                  [&](Communicator& ranks) {
                    Loose model({3000, 3000});
                    EngineOptions options{.communicator = &ranks};
                    if (ranks.rank() == 2) {
                      options.delay = [](const std::string&, const Op& op) {
                        if (std::string(op.name) == "reduce gradients")
                          std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                      };
                    }
                    Engine engine(model, loose_config("zero_offload", 2), options);
                    try {
                      engine.backward(model.loss(0, [](std::size_t) { return true; }), {.weight = 1, .last = true});
                      // Else the patience of the rank that stands still, which waits for the norms of others, might
                      // end before theirs.
                      if (ranks.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(250));
                      engine.step();
                    } catch (const std::exception& error) {
                      errors[static_cast<std::size_t>(ranks.rank())] = error.what();
                    }
                  },
                  {.timeout = {0.5}});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  int named = 0;
  for (int rank : {0, 1, 3}) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    EXPECT_FALSE(error.empty()) << "rank " << rank;
    named += error.find("for rank 2") != std::string::npos && error.find("\"reduce gradients\"") != std::string::npos;
  }
  EXPECT_GE(named, 1) << errors[0] << "\n" << errors[1] << "\n" << errors[3];
}

}  // namespace
}  // namespace spillway
