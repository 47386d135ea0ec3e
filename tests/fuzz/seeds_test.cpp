// SPDX-License-Identifier: Apache-2.0
// The fuzz targets on their seeds, so that the harness and what a run once found are part of every test run. A seed
// whose name begins with "good" must be accepted, every other one refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "formats/format_support.h"
#include "fuzz/targets.h"

namespace spillway {
namespace {

using Target = bool (*)(std::span<const std::byte>);

void expect_seeds(const char* name, Target target) {
  int good = 0;
  int bad = 0;
  const auto folder = std::filesystem::path(SPILLWAY_SOURCE_DIR) / "tests/fuzz/seeds" / name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string content = test::read_file(entry.path());
    const bool expected = entry.path().filename().string().starts_with("good");
    EXPECT_EQ(target(std::as_bytes(std::span(content))), expected) << entry.path();
    ++(expected ? good : bad);
  }
  EXPECT_GT(good, 0);
  EXPECT_GT(bad, 0);
}

TEST(FuzzSeeds, Safetensors) {
  expect_seeds("safetensors", fuzz::safetensors);
}
TEST(FuzzSeeds, ModelConfig) {
  expect_seeds("model_config", fuzz::model_config);
}
TEST(FuzzSeeds, Config) {
  expect_seeds("config", fuzz::config);
}
TEST(FuzzSeeds, LoraOptions) {
  expect_seeds("lora_options", fuzz::lora_options);
}
TEST(FuzzSeeds, TokenFile) {
  expect_seeds("token_file", fuzz::token_file);
}

// Every single byte of every seed, changed.
TEST(FuzzSeeds, NeighboursOfSeedsDoNotHarm) {
  const std::vector<std::pair<const char*, Target>> targets{{"safetensors", fuzz::safetensors},
                                                            {"model_config", fuzz::model_config},
                                                            {"config", fuzz::config},
                                                            {"lora_options", fuzz::lora_options},
                                                            {"token_file", fuzz::token_file}};
  int runs = 0;
  for (const auto& [name, target] : targets) {
    const auto folder = std::filesystem::path(SPILLWAY_SOURCE_DIR) / "tests/fuzz/seeds" / name;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::string content = test::read_file(entry.path());
      for (char& byte : content) {
        const char before = byte;
        byte = static_cast<char>(byte ^ (1 << (runs % 8)));
        EXPECT_NO_THROW(target(std::as_bytes(std::span(content)))) << entry.path();
        byte = before;
        ++runs;
      }
    }
  }
  EXPECT_GT(runs, 1000);
}

}  // namespace
}  // namespace spillway
