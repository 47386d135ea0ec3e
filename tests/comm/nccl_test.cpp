// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "project/mapped_libraries.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"
#include "support/contains.h"

namespace spillway {
namespace {

#ifdef SPILLWAY_WITH_NCCL
TEST(Nccl, IsOpenedWhereItIsAskedForWithAllItsFunctions) {
  EXPECT_TRUE(test::mapped({"libnccl"}).empty());  // other programs do not load it
  const std::string why = why_no_nccl();
  if (!why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(test::mapped({"libnccl"}).size(), 1u);
}
#else
TEST(Nccl, IsRefusedByABuildWithoutIt) {
  class NoStore final : public Store {
    void set(const std::string&, std::span<const std::byte>) override {}
    std::optional<std::vector<std::byte> > find(const std::string&) override { return std::nullopt; }
    void erase(const std::string&) override {}
  } store;
  try {
    static_cast<void>(make_nccl_communicator({}, store, 0));
    FAIL() << "NCCL was made";
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(test::contains(error.what(), {"need NCCL", "this build has no NCCL"}));
  }
}
#endif

}  // namespace
}  // namespace spillway
