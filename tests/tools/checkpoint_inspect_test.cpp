// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string>

#include "spillway/core/error.h"
#include "spillway/state/checkpoint_folder.h"
#include "tools/inspect.h"

namespace spillway {
namespace {

class CheckpointInspect : public testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() /
            (std::string("spillway_inspect_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path save(std::int64_t step) {
    CheckpointManifest manifest;
    manifest.step = step;
    manifest.skipped = 2;
    manifest.optimizer = "adamw";
    manifest.precision = DType::f16;
    manifest.groups.resize(2);
    manifest.scaler = LossScalerState{1024, 1, 1, 0};
    manifest.parameters = {{"weight", {3, 5}, 7}};
    manifest.frozen = frozen_;
    CheckpointWriter writer(root_, step);
    const TensorSource source{"weight", DType::f32, {3, 5}, [](std::span<std::byte> bytes) {
                                std::fill(bytes.begin(), bytes.end(), std::byte{1});
                              }};
    writer.add_file("masters.safetensors", std::array{source});
    return writer.commit(manifest);
  }

  std::filesystem::path root_;
  std::vector<FrozenParameter> frozen_ = {{"base", 1}};
};

TEST_F(CheckpointInspect, SaysWhatItHoldsAndWhatResumesIt) {
  const std::filesystem::path folder = save(7);
  const std::string text = tools::inspect(folder, false);
  for (const char* part :
       {"checkpoint: 7 updates done, 2 steps skipped", "optimizer adamw, 2 groups, written by a run in fp16",
        "loss scale 1024", "1 trained parameters, 15 elements; 1 frozen", "in any precision",
        "frozen parameters are compared in fp16 only", "there in full"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  }
  EXPECT_NE(tools::inspect(folder, true).find("masters.safetensors"), std::string::npos);
}

TEST_F(CheckpointInspect, WithoutFrozenParametersNothingIsSaidOfThem) {
  frozen_.clear();
  EXPECT_EQ(tools::inspect(save(7), false).find("compared"), std::string::npos);
}

TEST_F(CheckpointInspect, AFolderOfCheckpointsShowsTheNewest) {
  save(7);
  save(12);
  const std::string text = tools::inspect(root_, false);
  EXPECT_EQ(text.rfind("2 checkpoints\n  step-00000007: there in full\n  step-00000012: there in full\n"
                       "the newest that is whole:\ncheckpoint: 12 updates",
                       0),
            0u)
      << text;
}

TEST_F(CheckpointInspect, SaysOfEachCheckpointOfAFolderWhetherItIsWhole) {
  save(7);
  std::fstream(save(12) / "masters.safetensors", std::ios::in | std::ios::out | std::ios::ate | std::ios::binary)
      .seekp(-1, std::ios::end)
      .put('x');
  try {
    tools::inspect(root_, true);
    FAIL() << "damage was not noticed";
  } catch (const FileError& error) {
    const std::string text = error.what();
    for (const char* part : {"step-00000007: undamaged", "the file is damaged", "whole:\ncheckpoint: 7 updates"})
      EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  }
}

TEST_F(CheckpointInspect, DamageIsNamed) {
  const std::filesystem::path folder = save(1);
  const std::filesystem::path file = folder / "masters.safetensors";
  std::fstream(file, std::ios::in | std::ios::out | std::ios::ate | std::ios::binary).seekp(-1, std::ios::end).put('x');
  EXPECT_NO_THROW(tools::inspect(folder, false));
  EXPECT_THROW(tools::inspect(folder, true), FileError);
  std::filesystem::resize_file(file, 20);
  EXPECT_THROW(tools::inspect(folder, false), FileError);
}

}  // namespace
}  // namespace spillway
