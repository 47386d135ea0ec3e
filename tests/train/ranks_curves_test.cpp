// SPDX-License-Identifier: Apache-2.0
//
// The same training on one rank and on several: data, losses, bytes on the wire.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "kernels/exact_sum.h"
#include "spillway/formats/token_file.h"
#include "spillway/train/data_loader.h"
#include "train/fixture_runs.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::on_thread_ranks;
using test::tiny_config;
using test::tiny_llama;

constexpr std::int64_t kSteps = 50, kRows = 12;

struct SharedCurve {
  std::vector<double> losses;
  std::vector<std::vector<torch::Tensor>> rows;  // of each step, in rank order
};

// Twelve rows a step of a fixture's data, which wraps around, shared by the ranks.
SharedCurve train_shared(const std::string& name, int count) {
  SharedCurve out;
  out.rows.assign(kSteps, std::vector<torch::Tensor>(static_cast<std::size_t>(count)));
  std::mutex mutex;
  on_thread_ranks(count, [&](Communicator& ranks) {
    const std::filesystem::path folder = test::fixture_folder(name);
    const nlohmann::json reference = test::read_json(folder / "reference.json");
    const TokenFile file(folder / "rows.safetensors", 0);
    const auto model = load_causal_lm(folder);
    model->train();
    Engine engine(*model, test::fixture_config(reference, "zero_offload"), {.communicator = &ranks});
    DataLoader loader(file, model->config().vocabulary, {kRows, true, 3});
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const Batch batch = rows_of_rank(loader.next(), ranks.rank(), ranks.size());
      const torch::Tensor loss = next_token_loss(model->forward(batch.inputs), batch.targets, batch.valid_targets);
      const auto weight = static_cast<double>(batch.valid_targets);
      engine.backward(loss, {.weight = weight, .last = true});
      const double mean = engine.mean_over_ranks(loss.item<double>(), weight);
      EXPECT_EQ(engine.step().status, StepStatus::updated);
      const std::scoped_lock lock(mutex);
      if (ranks.rank() == 0) out.losses.push_back(mean);
      out.rows[static_cast<std::size_t>(step)][static_cast<std::size_t>(ranks.rank())] = batch.inputs;
    }
  });
  return out;
}

class SharedFixture : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, SharedFixture, testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2"));

TEST_P(SharedFixture, AnyNumberOfRanksSeesTheSameRowsAndLosses) {
  const SharedCurve one = train_shared(GetParam(), 1);
  for (int count : {2, 3}) {
    const SharedCurve shared = train_shared(GetParam(), count);
    for (std::size_t step = 0; step < one.losses.size(); ++step) {
      ASSERT_TRUE(torch::equal(torch::cat(shared.rows[step]), one.rows[step].front())) << "step " << step;
      ASSERT_NEAR(shared.losses[step], one.losses[step], 1e-5 * std::abs(one.losses[step]))
          << count << " ranks, step " << step;
    }
  }
  EXPECT_LT(one.losses.back(), one.losses.front());
}

// ---- bytes on the wire (docs/multi_gpu.md)
// ----------------------------------------------------------------------------

TEST(Wire, BytesOfAStepAreThoseOfTheFormulas) {
  for (int count : {2, 3, 4}) {
    for (int row : {0, 1, 2, 3, 4}) {
      const int stage = row % 3;
      const bool reduce_last = row >= 3;
      for (DType precision : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(testing::Message() << count << " ranks, stage " << stage << ", " << to_string(precision)
                                        << (reduce_last ? ", reduced last" : ""));
        on_thread_ranks(count, [&](Communicator& ranks) {
          const auto model = tiny_llama(false);
          Config config = tiny_config("zero_offload", 0.5, 4096, 1);
          config.stage = stage;
          config.precision = precision;
          config.reduce_last_only = reduce_last;
          Engine engine(*model, config, {.communicator = &ranks});
          constexpr std::int64_t kMicroBatches = 3;
          WireBytes before;
          for (std::int64_t step = 0; step < 3; ++step) {
            if (step == 2) before = ranks.wire_bytes();
            for (std::int64_t m = 0; m < kMicroBatches; ++m) {
              const torch::Tensor tokens = torch::arange(12).reshape({1, 12}) + ranks.rank();
              engine.backward(next_token_loss(model->forward(tokens), tokens, 12), {.weight = 12, .last = m == 2});
            }
            engine.step();
            engine.wait_parameters();
          }
          std::vector<ParameterInfo> parameters;
          for (const auto& entry : model->named_parameters()) {
            parameters.push_back({entry.key(), entry.value().sizes().vec(), 0});
          }
          const std::int64_t tensors = static_cast<std::int64_t>(parameters.size());
          const Layout layout(parameters, 4096, {count, ranks.rank(), 2});
          const std::int64_t all = layout.padded_elements(), own = layout.kept_elements();
          const std::int64_t others = count - 1, w = size_of(precision);
          // Agreements: a micro-batch's weight, order and end; a bit a parameter; where states are cut the exact sum.
          const std::int64_t small = kMicroBatches * 24 + (tensors + 7) / 8 +
                                     (stage == 0 ? 0 : static_cast<std::int64_t>(sizeof(kernels::ExactSum)));
          const std::int64_t times = reduce_last ? 1 : kMicroBatches, piece = reduce_last ? 4 : w;
          std::int64_t sent = times * (all - own) * piece + others * small;
          std::int64_t received = times * others * own * piece + others * small;
          if (stage == 0) {
            sent += times * others * own * 4;
            received += times * (all - own) * 4;
          } else {
            sent += others * own * w;
            received += (all - own) * w;
          }
          const WireBytes after = ranks.wire_bytes();
          EXPECT_EQ(after.sent - before.sent, sent);
          EXPECT_EQ(after.received - before.received, received);
        });
      }
    }
  }
}

}  // namespace
}  // namespace spillway
