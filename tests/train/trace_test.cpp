// SPDX-License-Identifier: Apache-2.0
//
// What overlaps with what, read from the timeline: gradient copies with backward, uploads with the next forward.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/training_runs.h"

namespace spillway {
namespace {

struct Span {
  double begin = 0, end = 0;
};
using Spans = std::vector<Span>;

// The spans of a timeline by "track/name".
std::map<std::string, Spans> read_spans(const std::filesystem::path& file) {
  std::ifstream stream(file);
  const nlohmann::json document = nlohmann::json::parse(stream);
  std::map<std::int64_t, std::string> tracks;
  std::map<std::string, Spans> out;
  for (const auto& event : document["traceEvents"]) {
    if (event["ph"] == "M" && event["name"] == "thread_name") tracks[event["tid"]] = event["args"]["name"];
  }
  for (const auto& event : document["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"], length = event["dur"];
    out[tracks[event["tid"]] + "/" + event["name"].get<std::string>()].push_back({begin, begin + length});
  }
  return out;
}

// How many spans of `some` share time with a span of `others`.
std::int64_t overlapping(const Spans& some, const Spans& others) {
  return std::count_if(some.begin(), some.end(), [&](const Span& a) {
    return std::any_of(others.begin(), others.end(), [&](const Span& b) { return a.begin < b.end && b.begin < a.end; });
  });
}

TEST(Trace, GradientsLeaveDuringBackwardAndWeightsArriveDuringTheNextForward) {
  const auto model = test::tiny_llama(false);
  Config config = test::tiny_config("zero_offload", 1.0, 2048, 1);
  // A link on which a chunk takes two milliseconds and a device slow enough that blocks take about as long, so that
  // what can overlap does, on any machine.
  config.device.upload_bandwidth = config.device.download_bandwidth = 4e6;
  config.device.compute_rate = 100e6;
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / "spillway_trace_test.json";
  {
    Engine engine(*model, config, {.trace_events = 1 << 16});
    for (std::int64_t step = 0; step < 4; ++step) {
      const torch::Tensor tokens = (torch::arange(24) + step).reshape({2, 12}) % 64;
      engine.backward(next_token_loss(model->forward(tokens), tokens, 24), {.last = true});
      engine.step();
    }
    engine.write_trace(file);
  }
  std::map<std::string, Spans> spans = read_spans(file);
  std::filesystem::remove(file);
  const Spans &down = spans["d2h/gradients down"], &up = spans["h2d/parameters up"];
  const Spans &backward = spans["engine/backward"], &forward = spans["forward/forward block"];
  ASSERT_EQ(backward.size(), 4U);
  ASSERT_EQ(forward.size(), 4U * 4U);
  ASSERT_GT(down.size(), 4U * 4U);
  EXPECT_GT(overlapping(down, backward), static_cast<std::int64_t>(down.size()) / 2);
  EXPECT_GT(overlapping(up, forward), 0);
  // No upload begins before its step's norm is known, that is, during a backward.
  EXPECT_GT(overlapping(spans["cpu/norm"], backward), 0);
  const auto begins_in = [&](const Span& u) {
    return std::any_of(backward.begin(), backward.end(),
                       [&](const Span& b) { return u.begin > b.begin && u.begin < b.end; });
  };
  EXPECT_EQ(std::count_if(up.begin(), up.end(), begins_in), 0);
}

TEST(Pace, AModelledComputeRateSlowsForwardAndBackward) {
  const auto model = test::tiny_llama(false);
  Config config = test::tiny_config("resident", 0, 1 << 20, 1);
  config.device.compute_rate = 50e6;
  Engine engine(*model, config, {.trace_events = 1 << 12});
  const torch::Tensor tokens = torch::arange(24).reshape({2, 12});
  const std::int64_t begin = Trace::now();
  engine.backward(next_token_loss(model->forward(tokens), tokens, 24), {.last = true});
  // 2 operations an element and row forward, 4 backward; the embedding's rows count too.
  double elements = 0;
  for (const torch::Tensor& p : model->parameters()) elements += static_cast<double>(p.numel());
  EXPECT_GE(static_cast<double>(Trace::now() - begin), 0.99e9 * 6 * elements * 24 / 50e6);
}

}  // namespace
}  // namespace spillway
