// SPDX-License-Identifier: Apache-2.0
//
// Whole training runs against curves made by PyTorch and Hugging Face transformers (tests/golden/*/reference.json).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <vector>

#include "spillway/formats/safetensors.h"
#include "spillway/models/causal_lm.h"
#include "train/fixture_runs.h"

namespace spillway {
namespace {

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
  const std::filesystem::path folder = test::fixture_folder(name);
  const nlohmann::json reference = test::read_json(folder / "reference.json");
  const auto model = load_causal_lm(folder);
  const test::Curve curve = test::train_fixture(*model, name, test::fixture_config(reference, schedule), 1);
  ASSERT_EQ(curve.losses.size(), reference["losses"].size());
  for (std::size_t step = 0; step < curve.losses.size(); ++step) {
    const double expected_loss = reference["losses"][step];
    const double expected_norm = reference["gradient_norms_before_clipping"][step];
    EXPECT_NEAR(curve.losses[step], expected_loss, 1e-5 * expected_loss) << "step " << step;
    EXPECT_NEAR(curve.norms[step], expected_norm, 1e-5 * expected_norm) << "step " << step;
  }
  const std::vector<double> distances = weight_distances(*model, folder);
  ASSERT_GT(distances.size(), 30000U);
  EXPECT_LT(distances[distances.size() * 999 / 1000], 2e-5);
  EXPECT_LT(distances.back(), 2e-4);
}

INSTANTIATE_TEST_SUITE_P(All, Fixture,
                         testing::Combine(testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "gemma2",
                                                          "gemma3"),
                                          testing::Values("resident", "zero_offload")));

}  // namespace
}  // namespace spillway
