// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/error.h"

#include <gtest/gtest.h>

#include <string>

namespace spillway {
namespace {

TEST(ErrorKinds, AllAreErrorsAndKeepTheirMessage) {
  const auto throw_one = [](int kind) {
    switch (kind) {
      case 0:
        throw InvalidArgument("said");
      case 1:
        throw FileError("said");
      case 2:
        throw StateError("said");
      case 3:
        throw OutOfMemory("said", 1, 1);
      default:
        throw InternalError("said");
    }
  };
  for (int kind = 0; kind < 5; ++kind) {
    try {
      throw_one(kind);
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "said");
    }
  }
}

TEST(ErrorKinds, OutOfMemoryKnowsTheBytes) {
  const OutOfMemory error("pinned: 10 bytes asked, 4 free", 10, 6);
  EXPECT_EQ(error.requested(), 10);
  EXPECT_EQ(error.missing(), 6);
}

TEST(Require, ThrowsTheCallersMistakeAsItStands) {
  EXPECT_NO_THROW(require(true, "never"));
  EXPECT_NO_THROW(require(true, std::string("never")));
  try {
    require(false, std::string("lr is -1: it must be positive"));
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "lr is -1: it must be positive");
  }
}

TEST(Check, NamesItselfAndThePlaceOfTheCall) {
  EXPECT_NO_THROW(check(true, "never"));
  const int line = __LINE__ + 2;
  try {
    check(false, "the slot was drained");
    FAIL() << "nothing was thrown";
  } catch (const InternalError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("the slot was drained"), std::string::npos);
    EXPECT_NE(message.find("error_test.cpp:" + std::to_string(line)), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace spillway
