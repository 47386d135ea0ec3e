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

std::filesystem::path seeds_of(const fuzz::NamedTarget& target) {
  return std::filesystem::path(SPILLWAY_SOURCE_DIR) / "tests/fuzz/seeds" / target.name;
}

class FuzzSeeds : public testing::TestWithParam<fuzz::NamedTarget> {};

TEST_P(FuzzSeeds, AreAcceptedOrRefusedAsTheirNamesSay) {
  int good = 0;
  int bad = 0;
  for (const auto& entry : std::filesystem::directory_iterator(seeds_of(GetParam()))) {
    const std::string content = test::read_file(entry.path());
    const bool expected = entry.path().filename().string().starts_with("good");
    EXPECT_EQ(GetParam().run(std::as_bytes(std::span(content))), expected) << entry.path();
    ++(expected ? good : bad);
  }
  EXPECT_GT(good, 0);
  EXPECT_GT(bad, 0);
}

// Every single byte of every seed, changed.
TEST_P(FuzzSeeds, NeighboursOfSeedsDoNotHarm) {
  int runs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(seeds_of(GetParam()))) {
    std::string content = test::read_file(entry.path());
    for (char& byte : content) {
      const char before = byte;
      byte = static_cast<char>(byte ^ (1 << (runs % 8)));
      EXPECT_NO_THROW(GetParam().run(std::as_bytes(std::span(content)))) << entry.path();
      byte = before;
      ++runs;
    }
  }
  EXPECT_GT(runs, 100);
}

INSTANTIATE_TEST_SUITE_P(, FuzzSeeds, testing::ValuesIn(fuzz::kTargets),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace spillway
