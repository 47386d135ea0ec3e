// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/units.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr std::int64_t kMi = std::int64_t{1} << 20;
constexpr std::int64_t kGi = std::int64_t{1} << 30;

TEST(ParseBytes, NumbersAndUnits) {
  const std::vector<std::pair<const char*, std::int64_t>> cases{{"0", 0},
                                                                {"4096", 4096},
                                                                {"17b", 17},
                                                                {"64MiB", 64 * kMi},
                                                                {"64 mib", 64 * kMi},
                                                                {"\t64  MIB \n", 64 * kMi},
                                                                {"1.5GB", 1'500'000'000},
                                                                {"1.5GiB", 3 * kGi / 2},
                                                                {"2g", 2 * kGi},
                                                                {"2G", 2 * kGi},
                                                                {"3k", 3 * 1024},
                                                                {"3kB", 3000},
                                                                {"3Ki", 3 * 1024},
                                                                {"1t", 1024 * kGi},
                                                                {"1TB", 1'000'000'000'000},
                                                                {"1e3", 1000},
                                                                {"1e3 MiB", 1000 * kMi},
                                                                {".5k", 512},
                                                                {"0.1KiB", 102},  // 102.4
                                                                {"0.0009765625MiB", 1024}};
  for (const auto& [text, bytes] : cases) EXPECT_EQ(parse_bytes(text).value, bytes) << text;
}

TEST(ParseBytes, WholeNumbersAreExactUpToTheLargest) {
  EXPECT_EQ(parse_bytes("9007199254740993").value, 9007199254740993);
  EXPECT_EQ(parse_bytes("9223372036854775807").value, std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse_bytes("8388607TiB").value, std::int64_t{8388607} << 40);
}

TEST(ParseBytes, WhatIsNoSizeIsNamed) {
  for (const char* text :
       {"",           " ",    "MiB",   "-1",  "-1GB", "-0.5k", "1.5", "0.3b", "1 2", "6 4MiB", "1,5GB", "0x10",
        "12 parsecs", "1GB2", "1 G B", "inf", "nan",  "infb",  "+5",  "1e",   "--1", "1.2.3",  "1GB/s", "1EiB"}) {
    try {
      parse_bytes(text);
      ADD_FAILURE() << "\"" << text << "\" was read";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find('"' + std::string(text) + '"'), std::string::npos) << error.what();
    }
  }
}

TEST(ParseBytes, WhatDoesNotFitIsTooLarge) {
  for (const char* text : {"9223372036854775808", "8388608TiB", "18446744073709551616", "1e19", "1e400", "99999999T",
                           "9.3e18", "8388608.0TiB", "9007199254740993G"}) {
    try {
      parse_bytes(text);
      ADD_FAILURE() << text << " was read";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("too large"), std::string::npos) << error.what();
    }
  }
}

TEST(ParseBandwidth, WithAndWithoutItsSecond) {
  EXPECT_EQ(parse_bandwidth("12GB/s"), 12e9);
  EXPECT_EQ(parse_bandwidth(" 12 GB/s "), 12e9);
  EXPECT_EQ(parse_bandwidth("12gb/S"), 12e9);
  EXPECT_EQ(parse_bandwidth("900 MiB/s"), 900.0 * kMi);
  EXPECT_EQ(parse_bandwidth("900MiB"), 900.0 * kMi);
  EXPECT_EQ(parse_bandwidth("0.5"), 0.5);
  EXPECT_EQ(parse_bandwidth("1e9/s"), 1e9);
}

TEST(ParseBandwidth, WhatIsNoneIsRefused) {
  for (const char* text :
       {"", "/s", "0", "0GB/s", "-1GB/s", "12GB/s/s", "12GB/h", "fast", "1e400GB/s", "inf/s", "12GBps"}) {
    EXPECT_THROW(parse_bandwidth(text), InvalidArgument) << text;
  }
}

TEST(ParseBandwidth, BitsAreNotTakenForBytes) {
  for (const char* text : {"100Gb/s", "100 Gb/s", "1.5e2Mb", "10Tib/s", "100Gbps", "100Gbit/s"}) {
    EXPECT_THROW(parse_bandwidth(text), InvalidArgument) << text;
  }
}

TEST(BytesToText, ThreeFiguresAndTheNearestUnit) {
  const std::vector<std::pair<std::int64_t, const char*>> cases{
      {0, "0 B"},
      {1023, "1023 B"},
      {-1023, "-1023 B"},
      {1024, "1.00 KiB"},
      {10229, "9.99 KiB"},
      {10236, "10.0 KiB"},  // 9.996
      {102392, "100 KiB"},  // 99.99
      {64 * kMi, "64.0 MiB"},
      {1000 * kMi, "1000 MiB"},
      {kGi - 1, "1.00 GiB"},
      {-3 * kGi / 2, "-1.50 GiB"},
      {1024 * kGi, "1.00 TiB"},
      {std::numeric_limits<std::int64_t>::max(), "8192 PiB"},
      {std::numeric_limits<std::int64_t>::min(), "-8192 PiB"}};
  for (const auto& [bytes, text] : cases) EXPECT_EQ(to_string(Bytes{bytes}), text);
}

TEST(BytesArithmetic, AddsSubtractsScalesAndCompares) {
  Bytes bytes{10};
  bytes += Bytes{5};
  bytes -= Bytes{1};
  EXPECT_EQ(bytes, Bytes{14});
  EXPECT_EQ(Bytes{3} + Bytes{4} - Bytes{2}, Bytes{5});
  EXPECT_EQ(Bytes{3} * 4, Bytes{12});
  EXPECT_LT(Bytes{3}, Bytes{4});
  EXPECT_LT(Seconds{0.5}, Seconds{1});
}

}  // namespace
}  // namespace spillway
