// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/offload/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

#include "spillway/core/error.h"

namespace spillway::bench {
namespace {

constexpr double kWindows = 5;            // of a measurement
constexpr std::int64_t kWarmUp = 2;       // operations of each activity that are never counted
constexpr std::size_t kLeastSamples = 3;  // of each activity, however long they take

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double quantile(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(at));
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - std::floor(at)) * (sorted[high] - sorted[low]);
}

/// What the threads of one measurement know of each other.
struct Together {
  int count = 0;
  double seconds = 0;
  std::atomic<int> warm{0}, sampled{0};
  std::atomic<bool> over{false};
  std::mutex mutex;
  std::exception_ptr error;
};

void repeat(const Activity& activity, Together& all, std::vector<double>& samples) {
  if (activity.begin) activity.begin();
  double start = 0, window = 0;
  std::int64_t operations = 0;
  for (std::int64_t i = 1; !all.over; ++i) {
    activity.once();
    const double time = now();
    if (i == kWarmUp) ++all.warm;
    if (all.warm < all.count) continue;
    if (start == 0) {  // this operation may have begun while another activity still warmed up
      start = window = time;
      continue;
    }
    ++operations;
    if (all.over && samples.size() >= kLeastSamples) break;  // it was alone for a part of the window
    if (time - window < all.seconds / kWindows) continue;
    samples.push_back((time - window) / static_cast<double>(operations));
    window = time;
    operations = 0;
    if (samples.size() == kLeastSamples) ++all.sampled;
    if (time - start >= all.seconds && all.sampled == all.count) all.over = true;
  }
  if (activity.end) activity.end();
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  require(!values.empty(), "a spread needs at least one measurement");
  std::sort(values.begin(), values.end());
  return {quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75),
          values.front(),        values.back(),          static_cast<std::int64_t>(values.size())};
}

std::vector<std::vector<double>> run_together(const std::vector<Activity>& activities, double seconds) {
  Together all;
  all.count = static_cast<int>(activities.size());
  all.seconds = seconds;
  std::vector<std::vector<double>> samples(activities.size());
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < activities.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        repeat(activities[i], all, samples[i]);
      } catch (...) {
        const std::lock_guard lock(all.mutex);
        if (!all.error) all.error = std::current_exception();
        all.over = true;
      }
    });
  }
  threads.clear();  // joins
  if (all.error) std::rethrow_exception(all.error);
  return samples;
}

}  // namespace spillway::bench
