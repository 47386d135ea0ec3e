// SPDX-License-Identifier: Apache-2.0
#include "memory/host_region.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {
namespace {

// Of this process, in memory now.
std::int64_t resident_bytes() {
  std::int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// A sanitizer keeps notes on every byte of the process, in memory too.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kMeasurable = false;
#else
constexpr bool kMeasurable = true;
#endif

TEST(HostRegion, IsWritableToItsEndWhateverTheNode) {
  for (int node : {-1, 0, 5, 1023, 100'000}) {
    const HostRegion region(Bytes{70'001}, node);
    for (std::size_t i = 0; i < region.size(); ++i) region.base()[i] = std::byte{1};
    EXPECT_EQ(region.base()[region.size() - 1], std::byte{1});
  }
  EXPECT_EQ(HostRegion(Bytes{0}, -1).base(), nullptr);
}

TEST(HostRegion, IsInMemoryAtOnceAndTakesWhatWasAskedFor) {
  if (!kMeasurable) GTEST_SKIP() << "memory is measured in builds without sanitizers";
  constexpr std::int64_t kAsked = (std::int64_t{64} << 20) + 4096;  // not a power of two: nothing is rounded up to one
  const std::int64_t before = resident_bytes();
  const HostRegion region(Bytes{kAsked}, 0);
  const std::int64_t taken = resident_bytes() - before;
  EXPECT_GE(taken, kAsked * 98 / 100);
  EXPECT_LE(taken, kAsked * 108 / 100);  // huge pages at both ends
}

TEST(HostRegion, OddSizesAreNotRoundedUpAndGoBack) {
  if (!kMeasurable) GTEST_SKIP() << "memory is measured in builds without sanitizers";
  const std::int64_t page = sysconf(_SC_PAGESIZE), before = resident_bytes();
  std::vector<std::unique_ptr<HostRegion>> regions;
  std::int64_t asked = 0;
  for (int k = 8; k <= 13; ++k) {
    const std::int64_t size = ((std::int64_t{1} << k) + 1) * page;
    regions.push_back(std::make_unique<HostRegion>(Bytes{size}, -1));
    EXPECT_EQ(static_cast<std::int64_t>(regions.back()->size()), size);
    asked += size;
  }
  EXPECT_GE(resident_bytes() - before, asked * 98 / 100);
  EXPECT_LE(resident_bytes() - before, asked * 102 / 100 + (1 << 20));
  regions.clear();
  EXPECT_LE(resident_bytes() - before, 1 << 20);
}

TEST(HostRegion, TooMuchIsRefused) {
  EXPECT_THROW(HostRegion(Bytes{std::int64_t{1} << 60}, -1), OutOfMemory);
}

}  // namespace
}  // namespace spillway
