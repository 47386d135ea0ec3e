// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A folder of the test's own, gone when it ends.
class TraceFile : public ::testing::Test {
 protected:
  TraceFile() {
    folder_ = fs::temp_directory_path() / ("spillway_trace_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  ~TraceFile() override { fs::remove_all(folder_); }

  json written(const Trace& trace) const {
    trace.write_chrome_json(folder_ / "trace.json");
    return json::parse(std::ifstream(folder_ / "trace.json"));
  }

  // The events of a phase: "X" spans, "C" counters, "M" metadata.
  static std::vector<json> events(const json& file, const std::string& phase) {
    std::vector<json> found;
    for (const json& event : file.at("traceEvents")) {
      if (event.at("ph") == phase) found.push_back(event);
    }
    return found;
  }

  fs::path folder_;
};

TEST_F(TraceFile, SpansKeepTrackTimesAndAmounts) {
  Trace trace({.rank = 3});
  const TraceTrack h2d = trace.track("h2d");
  const TraceTrack compute = trace.track("compute");
  trace.span(h2d, trace.label("fetch"), 1'234'567, 2'234'567, 4096, 7);
  trace.span(compute, trace.label("forward"), 2'000'000, 2'000'001);

  const json file = written(trace);
  const auto spans = events(file, "X");
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0]["name"], "fetch");
  EXPECT_EQ(spans[0]["pid"], 3);
  EXPECT_DOUBLE_EQ(spans[0]["ts"].get<double>(), 1234.567);
  EXPECT_DOUBLE_EQ(spans[0]["dur"].get<double>(), 1000.0);
  EXPECT_EQ(spans[0]["args"], (json{{"bytes", 4096}, {"index", 7}}));
  EXPECT_DOUBLE_EQ(spans[1]["dur"].get<double>(), 0.001);
  EXPECT_TRUE(spans[1]["args"].empty());
  EXPECT_NE(spans[0]["tid"], spans[1]["tid"]);

  std::map<int, std::string> names;
  for (const json& event : events(file, "M")) {
    if (event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
  }
  EXPECT_EQ(names.at(spans[0]["tid"]), "h2d");
  EXPECT_EQ(names.at(spans[1]["tid"]), "compute");
}

TEST_F(TraceFile, LargeClockValuesKeepTheirNanoseconds) {
  Trace trace;
  const std::int64_t month_ns = std::int64_t{30} * 86'400 * 1'000'000'000 + 1;
  trace.span("host", "step", month_ns, month_ns + 2);
  trace.write_chrome_json(folder_ / "trace.json");
  std::ifstream in(folder_ / "trace.json");
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  EXPECT_NE(text.find(R"("ts":2592000000000.001,"dur":0.002)"), std::string::npos) << text;
}

TEST_F(TraceFile, NamesThatNeedEscapingGiveValidJson) {
  Trace trace;
  const std::string name = "a \"quote\", a \\ and a\nline";
  trace.span(name, name, 0, 1);
  trace.span("track", "broken \xff utf-8", 0, 1);
  trace.counter("tab\there", 5);
  const json file = written(trace);
  EXPECT_EQ(events(file, "X")[0]["name"], name);
  EXPECT_EQ(events(file, "C")[0]["name"], "tab\there");
}

TEST_F(TraceFile, CountersKeepTheirValues) {
  Trace trace;
  const TraceLabel pinned = trace.label("pinned bytes");
  trace.counter(pinned, 100, 5'000);
  trace.counter(pinned, -1, 6'000);
  const auto counters = events(written(trace), "C");
  ASSERT_EQ(counters.size(), 2u);
  EXPECT_EQ(counters[0]["args"]["value"], 100);
  EXPECT_DOUBLE_EQ(counters[0]["ts"].get<double>(), 5.0);
  EXPECT_EQ(counters[1]["args"]["value"], -1);
}

TEST_F(TraceFile, EventsBeyondTheLimitAreCountedAndTotalsStayExact) {
  Trace trace({.max_events = 4});
  const TraceTrack lane = trace.track("d2h");
  const TraceLabel label = trace.label("evict");
  for (int i = 0; i < 10; ++i) trace.span(lane, label, i * 100, i * 100 + 50, 8, i);
  EXPECT_EQ(trace.dropped(), 6);
  const json file = written(trace);
  EXPECT_EQ(events(file, "X").size(), 4u);
  EXPECT_EQ(file["otherData"]["dropped_events"], 6);
  const auto totals = trace.totals();
  ASSERT_EQ(totals.size(), 1u);
  EXPECT_EQ(totals[0].name, "d2h");
  EXPECT_EQ(totals[0].count, 10);
  EXPECT_EQ(totals[0].bytes, 80);
  EXPECT_DOUBLE_EQ(totals[0].busy_seconds, 500e-9);
}

TEST_F(TraceFile, OffRecordsNothingUntilSwitchedOn) {
  Trace trace({.enabled = false});
  const TraceTrack lane = trace.track("lane");
  const TraceLabel label = trace.label("op");
  trace.span(lane, label, 0, 10);
  trace.counter("bytes", 1);
  { const ScopedSpan span(trace, lane, label); }
  EXPECT_EQ(trace.totals()[0].count, 0);
  EXPECT_TRUE(events(written(trace), "X").empty());

  trace.enable(true);
  { const ScopedSpan span(trace, lane, label, 16, 2); }
  trace.enable(false);
  trace.span(lane, label, 0, 10);
  EXPECT_EQ(trace.totals()[0].count, 1);
  EXPECT_EQ(trace.totals()[0].bytes, 16);
  EXPECT_EQ(events(written(trace), "X").size(), 1u);
}

TEST_F(TraceFile, ScopedSpanCoversItsScope) {
  Trace trace;
  const std::int64_t before = Trace::now();
  { const ScopedSpan span(trace, trace.track("host"), trace.label("scope")); }
  const std::int64_t after = Trace::now();
  const auto spans = events(written(trace), "X");
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_GE(spans[0]["ts"].get<double>() + 1e-3, static_cast<double>(before) * 1e-3);
  EXPECT_LE(spans[0]["ts"].get<double>() + spans[0]["dur"].get<double>(), static_cast<double>(after) * 1e-3 + 1e-3);
}

TEST_F(TraceFile, OneNameIsOneTrack) {
  Trace trace;
  trace.span("lane", "op", 0, 1);
  trace.span(trace.track("lane"), trace.label("op"), 2, 3);
  EXPECT_EQ(trace.totals().size(), 1u);
  EXPECT_EQ(trace.totals()[0].count, 2);
}

TEST_F(TraceFile, NamesBeyondTheLimitBecomeOther) {
  Trace trace;
  for (int i = 0; i < Trace::kMaxLabels + 5; ++i) trace.span("lane", "op " + std::to_string(i), i, i + 1);
  const auto spans = events(written(trace), "X");
  EXPECT_EQ(spans.front()["name"], "op 0");
  EXPECT_EQ(spans.back()["name"], "other");
}

TEST_F(TraceFile, AnEndBeforeItsBeginCountsAsNoTime) {
  Trace trace;
  trace.span("lane", "op", 100, 50);
  EXPECT_DOUBLE_EQ(trace.totals()[0].busy_seconds, 0.0);
  EXPECT_DOUBLE_EQ(events(written(trace), "X")[0]["dur"].get<double>(), 0.0);
}

TEST_F(TraceFile, ThreadsRecordTogetherWhileTotalsAreReadAndFilesWritten) {
  constexpr int kThreads = 4;
  constexpr int kSpans = 2000;
  Trace trace({.max_events = kThreads * kSpans});
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&trace, t] {
      const TraceTrack own = trace.track("thread " + std::to_string(t));
      const TraceTrack shared = trace.track("shared");
      const TraceLabel label = trace.label("op");
      for (int i = 0; i < kSpans; ++i) trace.span(i % 2 == 0 ? own : shared, label, i, i + 1, 1);
    });
  }
  for (int i = 0; i < 5; ++i) {
    EXPECT_LE(events(written(trace), "X").size(), static_cast<std::size_t>(kThreads * kSpans));
  }
  for (std::thread& thread : threads) thread.join();
  std::int64_t bytes = 0;
  for (const TrackTotal& total : trace.totals()) bytes += total.bytes;
  EXPECT_EQ(bytes, kThreads * kSpans);
  EXPECT_EQ(trace.dropped(), 0);
  EXPECT_EQ(events(written(trace), "X").size(), static_cast<std::size_t>(kThreads * kSpans));
}

TEST_F(TraceFile, AFolderThatIsMissingIsNamed) {
  Trace trace;
  const fs::path path = folder_ / "missing" / "trace.json";
  try {
    trace.write_chrome_json(path);
    FAIL() << "wrote into a missing folder";
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
}

TEST_F(TraceFile, AFailedWriteLeavesWhatWasThere) {
  Trace trace;
  const fs::path target = folder_ / "taken";
  fs::create_directories(target / "inside");
  EXPECT_THROW(trace.write_chrome_json(target), FileError);
  EXPECT_TRUE(fs::is_directory(target / "inside"));
  EXPECT_FALSE(fs::exists(folder_ / "taken.partial"));
}

TEST(Trace, RefusesANegativeLimit) {
  EXPECT_THROW(Trace({.max_events = -1}), InvalidArgument);
}

}  // namespace
}  // namespace spillway
