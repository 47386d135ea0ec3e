// SPDX-License-Identifier: Apache-2.0
//
// Rows in order, epoch after epoch, and what of them is trained on.
#include "spillway/train/data_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/train/engine.h"
#include "spillway/train/metrics.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::same_bits;
using test::tiny_config;
using test::tiny_llama;
using Rows = std::vector<std::int64_t>;

constexpr std::int64_t kRows = 5, kLength = 6;

std::int32_t token_at(std::int64_t row, std::int64_t position) {
  return static_cast<std::int32_t>((row * 7 + position * 3 + 1) % 64);
}
// The elements that a response has: none in every second row.
bool is_said(std::int64_t row, std::int64_t position) {
  return row % 2 == 0 && position >= 3 && position < 5 + row / 4;
}

std::filesystem::path write_rows(const std::string& name, const std::function<bool(std::int64_t, std::int64_t)>& said) {
  std::vector<std::int32_t> tokens, labels;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i <= kLength; ++i) {
      tokens.push_back(token_at(row, i));
      labels.push_back(said(row, i) ? tokens.back() : -100);
    }
  }
  const auto tensor = [](const char* what, const std::vector<std::int32_t>& values) {
    return TensorSource{what, DType::i32, {kRows, kLength + 1}, [values](std::span<std::byte> out) {
                          std::memcpy(out.data(), values.data(), out.size());
                        }};
  };
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / ("spillway_" + name + ".safetensors");
  write_safetensors(file, std::vector{tensor("tokens", tokens), tensor("labels", labels)});
  return file;
}
TokenFile responses() {
  return TokenFile(write_rows("responses", is_said), 0);
}
TokenFile everything() {
  return TokenFile(write_rows("everything", [](std::int64_t, std::int64_t) { return true; }), 0);
}

// The rows of the next `batches` batches, told by their first tokens.
Rows next_rows(DataLoader& loader, std::int64_t batches) {
  Rows rows;
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    const torch::Tensor first = loader.next().inputs.select(1, 0);
    for (std::int64_t i = 0; i < first.numel(); ++i) rows.push_back((first[i].item<std::int64_t>() - 1) / 7);
  }
  return rows;
}
DataLoader make_loader(const TokenFile& file, std::int64_t batch_size, bool shuffle = false) {
  return DataLoader(file, 64, {.batch_size = batch_size, .shuffle = shuffle, .seed = 9});
}

TEST(DataLoader, GivesEachRowOnceAnEpochAndFillsItsLastBatchFromTheNext) {
  const TokenFile file = everything();
  for (const std::int64_t batch_size : {1, 2, 3, 4, 5, 7, 12}) {
    for (const bool shuffle : {false, true}) {
      DataLoader loader = make_loader(file, batch_size, shuffle);
      Rows rows = next_rows(loader, kRows * 3);
      EXPECT_EQ(loader.position(), kRows * 3 * batch_size);
      for (auto epoch = rows.begin(); epoch != rows.end(); epoch += kRows) {
        std::sort(epoch, epoch + kRows);
        EXPECT_EQ(Rows(epoch, epoch + kRows), (Rows{0, 1, 2, 3, 4})) << batch_size << shuffle;
      }
    }
  }
}

TEST(DataLoader, TheOrderIsThatOfTheSeedWhateverTheBatchSize) {
  const TokenFile file = everything();
  DataLoader single = make_loader(file, 1, true);
  const Rows expected = next_rows(single, 60);
  EXPECT_NE(Rows(expected.begin(), expected.begin() + 30), Rows(expected.begin() + 30, expected.end()));
  for (const std::int64_t batch_size : {2, 3, 4, 6, 10}) {
    DataLoader loader = make_loader(file, batch_size, true);
    EXPECT_EQ(next_rows(loader, 60 / batch_size), expected) << batch_size;
  }
}

TEST(DataLoader, GoesOnFromAnyPositionTheMiddleOfALastBatchIncluded) {
  const TokenFile file = everything();
  DataLoader single = make_loader(file, 1, true);
  const Rows expected = next_rows(single, 40);
  DataLoader other = make_loader(file, 2, true);
  for (const std::int64_t position : {26, 0, 4, 5, 19, 6, 25, 9}) {
    other.seek(position);
    EXPECT_EQ(other.position(), position);
    EXPECT_EQ(next_rows(other, 6), Rows(expected.begin() + position, expected.begin() + position + 12)) << position;
  }
  EXPECT_THROW(other.seek(-1), InvalidArgument);
  EXPECT_THROW(make_loader(file, 0), InvalidArgument);
}

TEST(Masks, ReachTheBatchAndCountNoTargetTheyCover) {
  const TokenFile file = responses();
  DataLoader loader = make_loader(file, kRows);
  const Batch batch = loader.next();
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i < kLength; ++i) {
      const bool said = is_said(row, i + 1);
      count += said ? 1 : 0;
      EXPECT_EQ(batch.inputs[row][i].item<std::int64_t>(), token_at(row, i));
      EXPECT_EQ(batch.targets[row][i].item<std::int64_t>(), said ? token_at(row, i + 1) : kIgnoredTarget);
    }
  }
  EXPECT_EQ(count, 7);
  EXPECT_EQ(batch.valid_targets, count);
}

torch::Tensor loss_of(CausalLM& model, const Batch& batch) {
  return next_token_loss(model.forward(batch.inputs, batch.documents), batch.targets, batch.valid_targets);
}

// The mean of -log p over the tokens that `said` names, from the logits, in double.
double by_hand(CausalLM& model, const TokenFile& file, const std::function<bool(std::int64_t, std::int64_t)>& said) {
  const torch::NoGradGuard no_grad;
  DataLoader loader = make_loader(file, kRows);
  const torch::Tensor logits = model.forward(loader.next().inputs).to(torch::kDouble).contiguous();
  double sum = 0, count = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i < kLength; ++i) {
      if (!said(row, i + 1)) continue;
      const double* at = logits[row][i].const_data_ptr<double>();
      double total = 0;
      for (std::int64_t k = 0; k < 64; ++k) total += std::exp(at[k]);
      sum += std::log(total) - at[token_at(row, i + 1)];
      count += 1;
    }
  }
  return sum / count;
}

TEST(Masks, TheLossOfResponsesIsThatOfTheirTokensAndNotThatOfAll) {
  const TokenFile masked = responses(), plain = everything();
  const auto model = tiny_llama(false);
  const auto loss = [&](const TokenFile& file) {
    const torch::NoGradGuard no_grad;
    DataLoader loader = make_loader(file, kRows);
    return loss_of(*model, loader.next()).item<double>();
  };
  const double said = by_hand(*model, masked, is_said);
  const double all = by_hand(*model, masked, [](std::int64_t, std::int64_t) { return true; });
  EXPECT_GT(std::abs(said - all), 1e-3);
  EXPECT_NEAR(loss(masked), said, 1e-5);
  EXPECT_NEAR(loss(plain), all, 1e-5);
}

TEST(Masks, EvaluationCountsEachRowOnceAndItsTargetsAlone) {
  const TokenFile masked = responses();
  const auto model = tiny_llama(false);
  const double expected = by_hand(*model, masked, is_said);
  for (const std::int64_t batch_size : {1, 2, 3, 4, 5, 8})
    EXPECT_NEAR(evaluate(*model, masked, batch_size, 0), expected, 1e-5) << batch_size;
  const double first =
      by_hand(*model, masked, [](std::int64_t row, std::int64_t i) { return row < 2 && is_said(row, i); });
  EXPECT_NEAR(evaluate(*model, masked, 2, 1), first, 1e-5);
}

// Rows by number, each a micro-batch.
StepResult step_of(Engine& engine, CausalLM& model, DataLoader& loader, const Rows& rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    loader.seek(rows[i]);
    const Batch batch = loader.next();
    engine.backward(loss_of(model, batch),
                    {.weight = static_cast<double>(batch.valid_targets), .last = i + 1 == rows.size()});
  }
  return engine.step();
}

TEST(Masks, MicroBatchesWithoutATargetChangeNothingOnAnySchedule) {
  const TokenFile file = responses();
  std::vector<torch::Tensor> expected;
  for (const std::string schedule : {"resident", "zero_offload"}) {
    for (const bool with_empty_ones : {false, true}) {
      const auto model = tiny_llama(true);
      Engine engine(*model, tiny_config(schedule, 0.5, 4096, 1));
      DataLoader loader = make_loader(file, 1);
      for (int step = 0; step < 3; ++step) {
        if (with_empty_ones) {
          EXPECT_EQ(step_of(engine, *model, loader, {1, 3}).status, StepStatus::empty);
        }
        const Rows rows = with_empty_ones ? Rows{1, 0, 3, 2, 4, 1} : Rows{0, 2, 4};
        EXPECT_EQ(step_of(engine, *model, loader, rows).status, StepStatus::updated);
      }
      std::vector<torch::Tensor> masters;
      for (const std::string& name : test::trained_names(*model)) masters.push_back(engine.master(name));
      if (expected.empty()) expected = masters;
      for (std::size_t i = 0; i < masters.size(); ++i) EXPECT_TRUE(same_bits(masters[i], expected[i])) << schedule;
    }
  }
}

TEST(Masks, AStepOfSeveralMicroBatchesHasTheMeanOverAllTheirTargets) {
  const TokenFile file = responses();
  std::vector<double> norms;
  for (const std::int64_t batch_size : {1, 5}) {  // rows have 2, 0, 2, 0 and 3 targets
    const auto model = tiny_llama(true);
    Engine engine(*model, tiny_config("zero_offload", 0, 4096, 1));
    DataLoader loader = make_loader(file, batch_size);
    norms.push_back(step_of(engine, *model, loader, batch_size == 1 ? Rows{0, 1, 2, 3, 4} : Rows{0}).grad_norm);
  }
  EXPECT_GT(norms[0], 0);
  EXPECT_NEAR(norms[0], norms[1], 1e-5 * norms[1]);
}

}  // namespace
}  // namespace spillway
