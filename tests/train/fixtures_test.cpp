// SPDX-License-Identifier: Apache-2.0
//
// Whole training runs against curves made by PyTorch and Hugging Face transformers (tests/golden/*/reference.json).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "spillway/formats/safetensors.h"
#include "spillway/formats/token_file.h"
#include "spillway/models/causal_lm.h"
#include "spillway/train/data_loader.h"
#include "spillway/train/engine.h"

namespace spillway {
namespace {

const std::filesystem::path kGolden = std::filesystem::path(SPILLWAY_SOURCE_DIR) / "tests" / "golden";

nlohmann::json read_json(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return nlohmann::json::parse(stream);
}

Config config_of(const nlohmann::json& reference, const std::string& schedule) {
  const auto& optimizer = reference["optimizer"];
  Config config;
  config.schedule = schedule;
  config.hyperparameters = {optimizer["lr"], optimizer["betas"][0], optimizer["betas"][1], optimizer["eps"],
                            optimizer["weight_decay"]};
  GroupConfig no_decay;
  no_decay.max_dims = 1;
  no_decay.weight_decay = 0;
  config.groups.push_back(no_decay);
  config.clip_norm = reference["clip_norm"];
  config.chunk_elements = 16 * 1024;
  return config;
}

// The distances of all final weights from PyTorch's, sorted.
std::vector<double> weight_distances(CausalLM& model, const std::filesystem::path& folder) {
  const SafetensorsReader reference(folder / "reference.safetensors");
  std::vector<double> out;
  for (const auto& entry : model.named_parameters()) {
    if (!reference.contains("final." + entry.key())) continue;  // a tied head
    const TensorView view = reference.tensor("final." + entry.key());
    std::vector<float> expected(static_cast<std::size_t>(view.numel()));
    convert_elements(view.dtype, view.bytes, DType::f32, std::as_writable_bytes(std::span(expected)), view.numel());
    const torch::Tensor actual = entry.value().detach().contiguous();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      out.push_back(
          std::abs(static_cast<double>(actual.const_data_ptr<float>()[i]) - static_cast<double>(expected[i])));
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

class Fixture : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(Fixture, LossesNormsAndFinalWeightsAreThoseOfPyTorch) {
  const auto [name, schedule] = GetParam();
  const std::filesystem::path folder = kGolden / name;
  const nlohmann::json reference = read_json(folder / "reference.json");
  const auto model = load_causal_lm(folder);
  const TokenFile rows(folder / "rows.safetensors", 0);
  {
    Engine engine(*model, config_of(reference, schedule));
    DataLoader loader(rows, model->config().vocabulary, {reference["batch"], false, 0});
    model->train();
    const std::int64_t steps = reference["steps"], accumulation = reference["accumulation"];
    for (std::int64_t step = 0; step < steps; ++step) {
      double loss_sum = 0, valid = 0;
      for (std::int64_t m = 0; m < accumulation; ++m) {
        const Batch batch = loader.next();
        const torch::Tensor loss = next_token_loss(model->forward(batch.inputs), batch.targets, batch.valid_targets);
        const auto weight = static_cast<double>(batch.valid_targets);
        engine.backward(loss, {.weight = weight, .last = m + 1 == accumulation});
        loss_sum += weight * loss.item<double>();
        valid += weight;
      }
      const StepResult result = engine.step();
      const double expected_loss = reference["losses"][static_cast<std::size_t>(step)];
      const double expected_norm = reference["gradient_norms_before_clipping"][static_cast<std::size_t>(step)];
      EXPECT_NEAR(loss_sum / valid, expected_loss, 1e-5 * expected_loss) << "step " << step;
      EXPECT_NEAR(result.grad_norm, expected_norm, 1e-5 * expected_norm) << "step " << step;
    }
  }
  const std::vector<double> distances = weight_distances(*model, folder);
  ASSERT_GT(distances.size(), 50000U);
  EXPECT_LT(distances[distances.size() * 999 / 1000], 2e-5);
  EXPECT_LT(distances.back(), 2e-4);
}

INSTANTIATE_TEST_SUITE_P(All, Fixture,
                         testing::Combine(testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2"),
                                          testing::Values("resident", "zero_offload")));

}  // namespace
}  // namespace spillway
