// SPDX-License-Identifier: Apache-2.0
//
// Training in bf16 and fp16 against curves of plain PyTorch with 16-bit working parameters and fp32 masters
// (tests/golden/*/low_precision.json, made by tools/reference_curves.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "spillway/models/causal_lm.h"
#include "train/fixture_runs.h"

namespace spillway {
namespace {

const char* const kFixtures[] = {"gpt2", "llama", "llama-tied-scaled-rope", "qwen2"};

/// The largest relative difference of a step's loss and norm. Both are measured; docs/numerics.md has the figures.
struct Distance {
  double losses = 0, norms = 0;
};

Distance tolerance(DType type) {
  return type == DType::bf16 ? Distance{4e-4, 1.2e-2} : Distance{1e-4, 3e-3};
}

double distance(const nlohmann::json& expected, const std::vector<double>& actual) {
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double value = expected.at(i);
    worst = std::max(worst, std::abs(actual[i] - value) / value);
  }
  return worst;
}

nlohmann::json curve_of(const std::string& name, DType type) {
  return test::read_json(test::fixture_folder(name) / "low_precision.json")["curves"][std::string(to_string(type))];
}

class LowPrecision : public testing::TestWithParam<std::tuple<const char*, DType, const char*>> {};

TEST_P(LowPrecision, LossesAndNormsAreThoseOfPyTorch) {
  const auto [name, type, schedule] = GetParam();
  const std::filesystem::path folder = test::fixture_folder(name);
  const nlohmann::json expected = curve_of(name, type);
  Config config = test::fixture_config(test::read_json(folder / "reference.json"), schedule);
  config.precision = type;
  config.loss_scale.initial = expected["loss_scale"];
  const auto model = load_causal_lm(folder);
  const test::Curve curve = test::train_fixture(*model, name, config, 2);
  ASSERT_EQ(curve.losses.size(), expected["losses"].size());
  const Distance off{distance(expected["losses"], curve.losses),
                     distance(expected["gradient_norms_before_clipping"], curve.norms)};
  RecordProperty("losses_off_by", std::to_string(off.losses));
  RecordProperty("norms_off_by", std::to_string(off.norms));
  EXPECT_LT(off.losses, tolerance(type).losses);
  EXPECT_LT(off.norms, tolerance(type).norms);
}

INSTANTIATE_TEST_SUITE_P(All, LowPrecision,
                         testing::Combine(testing::ValuesIn(kFixtures), testing::Values(DType::bf16, DType::f16),
                                          testing::Values("resident", "zero_offload")));

TEST(LowPrecisionTolerance, AdmitsAnotherOrderOfRoundingAndNoRunWithoutMasters) {
  for (const char* name : kFixtures) {
    for (DType type : {DType::bf16, DType::f16}) {
      const nlohmann::json distances = curve_of(name, type)["distances"];
      const Distance most = tolerance(type);
      for (const char* harmless : {"native", "threads"}) {
        EXPECT_LT(distances[harmless]["losses"].get<double>(), most.losses / 2) << name << " " << harmless;
        EXPECT_LT(distances[harmless]["norms"].get<double>(), most.norms / 2) << name << " " << harmless;
      }
      // Null: that run did not stay finite.
      const nlohmann::json& broken = distances["no_masters"]["losses"];
      EXPECT_TRUE(broken.is_null() || broken.get<double>() > 2 * most.losses) << name << " " << broken;
    }
  }
}

}  // namespace
}  // namespace spillway
