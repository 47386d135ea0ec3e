// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "comm/verbs.h"
#include "support/ranks.h"

namespace spillway {
namespace {

TEST(Verbs, DoOnThreadsWhatTheirContractSays) {
  int cells = 0;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const test::VerbCase& each : test::verb_cases()) {
      const test::RankErrors errors = test::run_ranks(ranks, each.body);
      for (const std::string& error : errors) EXPECT_EQ(error, "") << each.name << " with " << ranks << " ranks";
      ++cells;
    }
  }
  EXPECT_EQ(cells, 4 * 7);
}

TEST(Verbs, DoOnOneRankWhatTheirContractSays) {
  const auto comm = make_one_rank();
  EXPECT_EQ(comm->size(), 1);
  for (const test::VerbCase& each : test::verb_cases()) EXPECT_NO_THROW(each.body(*comm)) << each.name;
  EXPECT_EQ(comm->wire_bytes(), WireBytes{});
}

// Nobody waits between calls, so some ranks are a call ahead of others.
TEST(Verbs, FollowEachOtherAtAnyPace) {
  const test::RankErrors errors = test::run_ranks(3, [](Communicator& comm) {
    const auto cases = test::verb_cases();
    for (int round = 0; round < 5; ++round) {
      for (const test::VerbCase& each : cases) {
        if (each.name != "exchange") each.body(comm);
      }
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace spillway
