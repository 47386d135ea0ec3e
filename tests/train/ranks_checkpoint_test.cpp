// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of several ranks, which are threads here: written in parts, loaded by any number of ranks, or refused by
// all.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "spillway/core/error.h"
#include "spillway/train/data_loader.h"
#include "support/bits.h"
#include "support/process_memory.h"
#include "train/loose.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::on_thread_ranks;
using test::states_of;
using test::tiny_config;
using test::tiny_llama;

// Returns the mean loss before the step.
double take_step(CausalLM& model, Engine& engine, const Communicator& ranks, std::int64_t number) {
  const HostScope host;
  // Twelve rows, shared by the ranks.
  const torch::Tensor all = (torch::arange(12 * 9).reshape({12, 9}) * (number + 3)) % 64;
  const Batch batch =
      rows_of_rank({all.slice(1, 0, 8).contiguous(), all.slice(1, 1).contiguous(), {}, 96}, ranks.rank(), ranks.size());
  torch::Tensor loss;
  if (batch.valid_targets > 0) loss = next_token_loss(model.forward(batch.inputs), batch.targets, batch.valid_targets);
  const auto weight = static_cast<double>(batch.valid_targets);
  engine.backward(loss, {.weight = weight, .last = true});
  const double mean = engine.mean_over_ranks(loss.defined() ? loss.item<double>() : 0, weight);
  EXPECT_EQ(engine.step().status, StepStatus::updated);
  return mean;
}

TEST(RankCheckpoints, AnyNumberOfRanksStageAndPlacementLoadsAny) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "rank_checkpoints";
  int cells = 0;
  for (int savers : {1, 2, 3}) {
    for (int save_stage : {0, 2}) {
      std::filesystem::remove_all(root);
      std::map<std::string, torch::Tensor> expected;
      std::vector<double> losses;  // of the two steps that follow
      on_thread_ranks(savers, [&](Communicator& ranks) {
        const auto model = tiny_llama(true);
        Config config = tiny_config(save_stage == 0 ? "resident" : "zero_offload", 0.5, 3072, 1);
        config.stage = save_stage;
        Engine engine(*model, config, {.communicator = &ranks});
        for (std::int64_t step = 0; step < 3; ++step) take_step(*model, engine, ranks, step);
        engine.save(root, {.program = "at 3"});
        const auto states = states_of(engine, *model);
        std::vector<double> next;
        for (std::int64_t step = 3; step < 5; ++step) next.push_back(take_step(*model, engine, ranks, step));
        if (ranks.rank() == 0) {
          expected = states;
          losses = next;
        }
      });
      for (int loaders : {1, 2, 3, 4}) {
        for (int stage : {0, 1, 2}) {
          SCOPED_TRACE(testing::Message()
                       << savers << " saved at stage " << save_stage << ", " << loaders << " load at stage " << stage);
          on_thread_ranks(loaders, [&](Communicator& ranks) {
            const auto model = tiny_llama(true, 77);
            Config config = tiny_config(stage == 1 ? "resident" : "zero_offload", 0.5, 2048, 1);
            config.stage = stage;
            Engine engine(*model, config, {.communicator = &ranks});
            EXPECT_EQ(engine.load(root), "at 3");
            for (const auto& [name, tensor] : states_of(engine, *model)) {
              EXPECT_TRUE(test::same_bits(expected.at(name), tensor)) << name;
            }
            const HostScope host;
            EXPECT_TRUE(test::same_bits(model->named_parameters()["model.norm.weight"].detach(),
                                        expected.at("model.norm.weight")));
            for (std::size_t i = 0; i < losses.size(); ++i) {
              EXPECT_NEAR(take_step(*model, engine, ranks, 3 + static_cast<std::int64_t>(i)), losses[i],
                          1e-5 * losses[i]);
            }
          });
          ++cells;
        }
      }
    }
  }
  EXPECT_EQ(cells, 3 * 2 * 4 * 3);
  std::filesystem::remove_all(root);
}

// A rank reads its part from mapped files: beside the pools it holds a tensor at a time, never a copy of the
// checkpoint.
TEST(RankCheckpoints, LoadingHoldsNoCopyOfTheCheckpoint) {
  if (!test::kProcessMemoryIsMeasurable) GTEST_SKIP() << "a sanitizer keeps notes in the process's memory";
  mallopt(M_MMAP_THRESHOLD, 64 * 1024);  // what is freed leaves the process
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "rank_checkpoints_memory";
  std::filesystem::remove_all(root);
  ModelConfig shape = tiny_llama(false)->config();
  shape.vocabulary = 4000;
  shape.hidden = 256;
  shape.intermediate = 512;
  shape.layers = 4;
  std::int64_t masters = 0;
  for (const torch::Tensor& parameter : make_causal_lm(shape, 1)->parameters()) masters += 4 * parameter.numel();
  const std::int64_t largest = std::int64_t{4000} * 256 * 4;
  std::int64_t most = 0;
  on_thread_ranks(2, [&](Communicator& ranks) {
    const auto model = make_causal_lm(shape, 1);
    Engine engine(*model, tiny_config("zero_offload", 0, 0, 1), {.communicator = &ranks});
    engine.save(root);
    ranks.barrier({"saved"});
    const std::int64_t before = test::own_bytes();
    std::atomic<bool> done = false;
    std::thread watch;
    if (ranks.rank() == 0) {
      watch = std::thread([&] {
        while (!done) most = std::max(most, test::own_bytes() - before);
      });
    }
    ranks.barrier({"watched"});
    engine.load(root);
    ranks.barrier({"loaded"});
    done = true;
    if (watch.joinable()) watch.join();
  });
  // Of each of the two ranks a tensor, as it is read and as it is written.
  const std::int64_t bound = 4 * largest + (2 << 20);
  EXPECT_LT(most, bound);
  EXPECT_GT(2 * masters, bound) << "or a copy would not show";
  prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
  mallopt(M_MMAP_THRESHOLD, 128 * 1024);
  std::filesystem::remove_all(root);
}

TEST(RankCheckpoints, ARefusedOneLeavesEnginesAsTheyWereAndRanksMustSeeTheSame) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "rank_checkpoints_refused";
  std::filesystem::remove_all(root);
  on_thread_ranks(2, [&](Communicator& ranks) {
    const auto model = tiny_llama(true);
    Engine engine(*model, tiny_config("zero_offload", 0.5, 3072, 1), {.communicator = &ranks});
    take_step(*model, engine, ranks, 0);
    engine.save(root / "a");
    engine.save(root / "b");
    take_step(*model, engine, ranks, 1);
    engine.save(root / "b");
    EXPECT_THROW(engine.load(ranks.rank() == 0 ? root / "a" : root / "nothing"), FileError);
    try {
      engine.load(ranks.rank() == 0 ? root / "a" : root / "b");
      FAIL() << "ranks loaded different checkpoints";
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find("step-00000002"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("step-00000001"), std::string::npos) << error.what();
    }
    take_step(*model, engine, ranks, 2);
    engine.load(root / "a");
    take_step(*model, engine, ranks, 3);
  });
  std::filesystem::remove_all(root);
}

TEST(RankCheckpoints, AMissingOrDamagedPartIsNamed) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "rank_checkpoint_parts";
  std::filesystem::remove_all(root);
  std::filesystem::path folder;
  on_thread_ranks(2, [&](Communicator& ranks) {
    const auto model = tiny_llama(true);
    Engine engine(*model, tiny_config("zero_offload", 0.5, 3072, 1), {.communicator = &ranks});
    take_step(*model, engine, ranks, 0);
    const auto made = engine.save(root);
    if (ranks.rank() == 0) folder = made;
  });
  const auto load_error = [&](int loaders) {
    std::string text;
    try {
      on_thread_ranks(loaders, [&](Communicator& ranks) {
        const auto model = tiny_llama(true);
        Engine engine(*model, tiny_config("zero_offload", 0.5, 3072, 1), {.communicator = &ranks});
        engine.load(root);
      });
    } catch (const std::exception& error) {
      text = error.what();
    }
    return text;
  };
  EXPECT_EQ(load_error(2), "");
  const std::filesystem::path part = folder / "states-00001-00001.safetensors";
  ASSERT_TRUE(std::filesystem::exists(part));
  const auto size = std::filesystem::file_size(part);
  {
    std::fstream file(part, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(size) - 5);
    file.put('x');
  }
  EXPECT_NE(load_error(1).find("states-00001-00001.safetensors"), std::string::npos) << load_error(1);
  EXPECT_NE(load_error(2).find("states-00001-00001.safetensors"), std::string::npos) << load_error(2);
  std::filesystem::remove(part);
  EXPECT_NE(load_error(2).find("states-00001-00001.safetensors: this part of the checkpoint is missing"),
            std::string::npos)
      << load_error(2);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace spillway
