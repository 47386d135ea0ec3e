// SPDX-License-Identifier: Apache-2.0
#include "spillway/device/gpu.h"

#include <gtest/gtest.h>

#include <array>

#include "spillway/core/error.h"

namespace spillway {
namespace {

TEST(Gpu, WhatIsNotThereIsRefusedWithTheReasonAndTheWayOut) {
  for (int ordinal : {-1, 9999}) {
    const std::string reason = why_no_gpu(ordinal);
    ASSERT_FALSE(reason.empty());
    try {
      static_cast<void>(find_gpu(ordinal));
      FAIL() << "GPU " << ordinal << " was found";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("no usable GPU " + std::to_string(ordinal)), std::string::npos) << text;
      EXPECT_NE(text.find(reason), std::string::npos) << text;
      EXPECT_NE(text.find("emulated device"), std::string::npos) << text;
    }
  }
}

TEST(Gpu, EitherIsUsableOrSaysWhyNot) {
  if (why_no_gpu(0).empty()) {
    const GpuInfo gpu = find_gpu(0);
    EXPECT_FALSE(gpu.name.empty());
    EXPECT_GE(gpu.compute_capability, 80);
    EXPECT_GT(gpu.memory.value, 0);
    EXPECT_LE(gpu.free, gpu.memory);
  } else {
    EXPECT_THROW(static_cast<void>(find_gpu(0)), InvalidArgument);
  }
}

TEST(Copy, WithoutAStreamIsDoneAtOnce) {
  std::array<int, 5> from{1, 2, 3, 4, 5}, to{};
  copy_async({}, to.data(), from.data(), Bytes{4 * sizeof(int)});
  EXPECT_EQ(to, (std::array<int, 5>{1, 2, 3, 4, 0}));
  copy_async({}, nullptr, nullptr, Bytes{0});
}

}  // namespace
}  // namespace spillway
