// SPDX-License-Identifier: Apache-2.0
#include "train/fixture_runs.h"

#include <gtest/gtest.h>

#include <fstream>

#include "spillway/formats/token_file.h"
#include "spillway/train/data_loader.h"
#include "spillway/train/engine.h"

namespace spillway::test {

std::filesystem::path fixture_folder(const std::string& name) {
  return std::filesystem::path(SPILLWAY_SOURCE_DIR) / "tests" / "golden" / name;
}

nlohmann::json read_json(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return nlohmann::json::parse(stream);
}

Config fixture_config(const nlohmann::json& reference, const std::string& schedule) {
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

Curve train_fixture(CausalLM& model, const std::string& name, const Config& config, std::int64_t epochs) {
  const std::filesystem::path folder = fixture_folder(name);
  const nlohmann::json reference = read_json(folder / "reference.json");
  const TokenFile rows(folder / "rows.safetensors", 0);
  Engine engine(model, config);
  DataLoader loader(rows, model.config().vocabulary, {reference["batch"], false, 0});
  model.train();
  const std::int64_t steps = reference["steps"], accumulation = reference["accumulation"];
  Curve out;
  for (std::int64_t step = 0; step < epochs * steps; ++step) {
    double loss_sum = 0, valid = 0;
    for (std::int64_t m = 0; m < accumulation; ++m) {
      const Batch batch = loader.next();
      const torch::Tensor loss = next_token_loss(model.forward(batch.inputs), batch.targets, batch.valid_targets);
      const auto weight = static_cast<double>(batch.valid_targets);
      engine.backward(loss, {.weight = weight, .last = m + 1 == accumulation});
      loss_sum += weight * loss.item<double>();
      valid += weight;
    }
    const StepResult result = engine.step();
    EXPECT_EQ(result.status, StepStatus::updated) << "step " << step;
    out.losses.push_back(loss_sum / valid);
    out.norms.push_back(result.grad_norm);
  }
  return out;
}

}  // namespace spillway::test
