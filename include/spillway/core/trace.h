// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace spillway {

class Trace;

/// Names a row of the timeline: a lane, or a thread of the host. Valid as long as its trace; made by Trace::track.
class TraceTrack {
 public:
  TraceTrack() = default;

 private:
  friend class Trace;
  struct State;
  explicit TraceTrack(State* state) : state_(state) {}
  State* state_ = nullptr;
};

/// Names what a span or a counter shows. Valid as long as its trace; made by Trace::label.
class TraceLabel {
 public:
  TraceLabel() = default;

 private:
  friend class Trace;
  explicit TraceLabel(std::int32_t id) : id_(id) {}
  std::int32_t id_ = 0;
};

/// What one track did since the trace was made, over all its spans, also those dropped from the timeline.
struct TrackTotal {
  std::string name;
  std::int64_t count = 0;
  std::int64_t bytes = 0;
  double busy_seconds = 0;  ///< Sum of the spans' lengths: spans that overlap or nest count each.
};

/// Records what happened when: spans on tracks, and counters; written as a timeline that Perfetto and Chrome open.
///
/// A recorded event is a few stores into memory that was reserved when the trace was first switched on; an event beyond
/// `max_events` is counted and left out. While the trace is off, recording is one load and a branch.
/// Units: times are nanoseconds of the steady clock (see `now`), or any other origin, as long as it is the same for
/// all. Threads: every function may be called from any thread at any time.
class Trace {
 public:
  struct Options {
    bool enabled = true;
    std::int64_t max_events = std::int64_t{1} << 18;  ///< 40 bytes each.
    std::int32_t rank = 0;                            ///< The process number in the timeline.
  };

  /// Throws: InvalidArgument where max_events is negative.
  explicit Trace(Options options);
  Trace() : Trace(Options{}) {}
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  bool enabled() const { return enabled_.load(std::memory_order_acquire); }

  /// Switches recording on or off. Allocates: the first time it is switched on.
  void enable(bool on);

  /// The steady clock. Units: nanoseconds.
  static std::int64_t now();

  /// The track of that name, made at its first use; tracks stand in the timeline in the order they were made.
  TraceTrack track(std::string_view name);

  /// The label of that name, made at its first use. Meant for set-up: it takes a lock. Beyond kMaxLabels different
  /// names, new ones all become "other": put numbers into a span's `index`, not into its name.
  TraceLabel label(std::string_view name);
  static constexpr std::int32_t kMaxLabels = 4096;

  /// Records that `track` did `label` from `begin_ns` to `end_ns` (an end before the begin counts as no time).
  /// `index` says which chunk, block or step it was; negative: none.
  void span(TraceTrack track, TraceLabel label, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t bytes = 0,
            std::int64_t index = -1) {
    if (enabled()) record_span(track, label, begin_ns, end_ns, bytes, index);
  }

  /// The same by name, for places that run seldom: looks both names up.
  void span(std::string_view track, std::string_view label, std::int64_t begin_ns, std::int64_t end_ns,
            std::int64_t bytes = 0, std::int64_t index = -1);

  /// Records the value of a counter (bytes in a tier, ops in flight) at a time.
  void counter(TraceLabel label, std::int64_t value, std::int64_t at_ns) {
    if (enabled()) record_counter(label, value, at_ns);
  }

  /// The same by name, at the present time.
  void counter(std::string_view label, std::int64_t value);

  /// One entry a track, in the order they were made.
  std::vector<TrackTotal> totals() const;

  /// Events that found no room in the timeline.
  std::int64_t dropped() const;

  /// Writes the events recorded so far in Chrome's JSON form (microseconds), for ui.perfetto.dev and chrome://tracing.
  /// The file appears whole or not at all. Throws: FileError.
  void write_chrome_json(const std::filesystem::path& path) const;

 private:
  struct Event;

  void record_span(TraceTrack track, TraceLabel label, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t bytes,
                   std::int64_t index);
  void record_counter(TraceLabel label, std::int64_t value, std::int64_t at_ns);
  Event* take_slot();
  std::int64_t recorded() const;
  std::string event_json(const Event& event, const std::vector<std::string>& labels) const;
  std::string chrome_json() const;

  const Options options_;
  std::atomic<bool> enabled_{false};
  std::unique_ptr<Event[]> events_;  // Made once, before enabled_ becomes true; then never moved.
  std::atomic<std::int64_t> next_{0};

  mutable std::mutex mutex_;  // Guards the names and the making of events_.
  std::vector<std::unique_ptr<TraceTrack::State>> tracks_;
  std::vector<std::string> labels_;
  std::map<std::string, std::int32_t, std::less<>> label_ids_;
};

/// Records a span from its construction to its destruction. Owns: nothing; the trace must outlive it.
class ScopedSpan {
 public:
  ScopedSpan(Trace& trace, TraceTrack track, TraceLabel label, std::int64_t bytes = 0, std::int64_t index = -1)
      : trace_(trace.enabled() ? &trace : nullptr), track_(track), label_(label), bytes_(bytes), index_(index) {
    if (trace_ != nullptr) begin_ns_ = Trace::now();
  }
  ~ScopedSpan() {
    if (trace_ != nullptr) trace_->span(track_, label_, begin_ns_, Trace::now(), bytes_, index_);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  Trace* trace_;
  TraceTrack track_;
  TraceLabel label_;
  std::int64_t bytes_;
  std::int64_t index_;
  std::int64_t begin_ns_ = 0;
};

}  // namespace spillway
