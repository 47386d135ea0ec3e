// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/trace.h"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "spillway/core/error.h"

namespace spillway {

// The totals stand beside the timeline, so that they stay exact when events are dropped. A track is mostly written by
// one thread: its own cache line keeps tracks from slowing each other.
struct alignas(64) TraceTrack::State {
  State(std::string name_in, std::int32_t id_in) : name(std::move(name_in)), id(id_in) {}

  const std::string name;
  const std::int32_t id;
  std::atomic<std::int64_t> count{0};
  std::atomic<std::int64_t> bytes{0};
  std::atomic<std::int64_t> busy_ns{0};
};

struct Trace::Event {
  std::int64_t begin_ns = 0;
  std::int64_t amount = 0;  // A span's length in nanoseconds, or a counter's value.
  std::int64_t bytes = 0;
  std::int64_t index = 0;
  std::int32_t label = 0;
  std::int16_t track = 0;              // kCounter where the event is a counter's value.
  std::atomic<std::int16_t> ready{0};  // Set last: a reader takes only whole events.
};

namespace {

constexpr std::int16_t kCounter = -1;
constexpr std::int32_t kMaxTracks = 32767;

// A name as a JSON string. Names are the caller's: quotes, control characters and broken UTF-8 must not spoil the file.
std::string quoted(const std::string& name) {
  return nlohmann::json(name).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

// The format wants microseconds; written from integers, so that no digit is lost to a double.
std::string microseconds(std::int64_t ns) {
  const std::int64_t magnitude = ns < 0 ? -ns : ns;
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", magnitude / 1000, magnitude % 1000);
}

std::string metadata_json(std::string_view what, std::int32_t pid, std::int32_t tid, const std::string& args) {
  return fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{{}}}}})", what, pid, tid, args);
}

// Written beside the target and renamed over it: a reader never sees half a file.
void write_whole_file(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::path partial = path;
  partial += ".partial";
  errno = 0;
  std::ofstream out(partial, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  const int write_errno = errno;
  std::error_code status;
  if (out.fail()) {
    std::filesystem::remove(partial, status);
    throw FileError(fmt::format("Cannot write the trace {}: {}. Its folder must exist and have room for {} bytes.",
                                path.string(), std::strerror(write_errno), text.size()));
  }
  std::filesystem::rename(partial, path, status);
  if (status) {
    const std::string reason = status.message();
    std::filesystem::remove(partial, status);
    throw FileError(fmt::format("Cannot write the trace {}: {}. Give a file name in a folder that may be written.",
                                path.string(), reason));
  }
}

}  // namespace

Trace::Trace(Options options) : options_(options), labels_{"other"} {
  require(options.max_events >= 0,
          fmt::format("A trace's max_events is {}; give 0 (totals alone) or more.", options.max_events));
  if (options.enabled) enable(true);
}

Trace::~Trace() = default;

void Trace::enable(bool on) {
  const std::lock_guard lock(mutex_);
  if (on && !events_) events_ = std::make_unique<Event[]>(static_cast<std::size_t>(options_.max_events));
  enabled_.store(on, std::memory_order_release);
}

std::int64_t Trace::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

TraceTrack Trace::track(std::string_view name) {
  const std::lock_guard lock(mutex_);
  for (const auto& state : tracks_) {
    if (state->name == name) return TraceTrack(state.get());
  }
  const auto id = static_cast<std::int32_t>(tracks_.size());
  check(id < kMaxTracks, "a trace has one track a lane, not one an op");
  return TraceTrack(tracks_.emplace_back(std::make_unique<TraceTrack::State>(std::string(name), id)).get());
}

TraceLabel Trace::label(std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (const auto found = label_ids_.find(name); found != label_ids_.end()) return TraceLabel(found->second);
  const auto id = static_cast<std::int32_t>(labels_.size());
  if (id >= kMaxLabels) return TraceLabel(0);
  labels_.emplace_back(name);
  label_ids_.emplace(name, id);
  return TraceLabel(id);
}

void Trace::span(std::string_view track_name, std::string_view label_name, std::int64_t begin_ns, std::int64_t end_ns,
                 std::int64_t bytes, std::int64_t index) {
  if (enabled()) record_span(track(track_name), label(label_name), begin_ns, end_ns, bytes, index);
}

void Trace::counter(std::string_view label_name, std::int64_t value) {
  if (enabled()) record_counter(label(label_name), value, now());
}

Trace::Event* Trace::take_slot() {
  const std::int64_t slot = next_.fetch_add(1, std::memory_order_relaxed);
  return slot < options_.max_events ? &events_[static_cast<std::size_t>(slot)] : nullptr;
}

void Trace::record_span(TraceTrack track, TraceLabel label, std::int64_t begin_ns, std::int64_t end_ns,
                        std::int64_t bytes, std::int64_t index) {
  check(track.state_ != nullptr, "a span's track comes from Trace::track");
  TraceTrack::State& state = *track.state_;
  const std::int64_t length_ns = std::max<std::int64_t>(0, end_ns - begin_ns);
  state.count.fetch_add(1, std::memory_order_relaxed);
  state.bytes.fetch_add(bytes, std::memory_order_relaxed);
  state.busy_ns.fetch_add(length_ns, std::memory_order_relaxed);
  Event* event = take_slot();
  if (event == nullptr) return;
  event->begin_ns = begin_ns;
  event->amount = length_ns;
  event->bytes = bytes;
  event->index = index;
  event->label = label.id_;
  event->track = static_cast<std::int16_t>(state.id);
  event->ready.store(1, std::memory_order_release);
}

void Trace::record_counter(TraceLabel label, std::int64_t value, std::int64_t at_ns) {
  Event* event = take_slot();
  if (event == nullptr) return;
  event->begin_ns = at_ns;
  event->amount = value;
  event->label = label.id_;
  event->track = kCounter;
  event->ready.store(1, std::memory_order_release);
}

std::int64_t Trace::recorded() const {
  return std::min(next_.load(std::memory_order_relaxed), options_.max_events);
}

std::int64_t Trace::dropped() const {
  return next_.load(std::memory_order_relaxed) - recorded();
}

std::vector<TrackTotal> Trace::totals() const {
  const std::lock_guard lock(mutex_);
  std::vector<TrackTotal> totals;
  for (const auto& state : tracks_) {
    totals.push_back({state->name, state->count.load(std::memory_order_relaxed),
                      state->bytes.load(std::memory_order_relaxed),
                      static_cast<double>(state->busy_ns.load(std::memory_order_relaxed)) * 1e-9});
  }
  return totals;
}

std::string Trace::event_json(const Event& event, const std::vector<std::string>& labels) const {
  const std::string& name = labels[static_cast<std::size_t>(event.label)];
  if (event.track == kCounter) {
    return fmt::format(R"({{"ph":"C","name":{},"pid":{},"ts":{},"args":{{"value":{}}}}})", name, options_.rank,
                       microseconds(event.begin_ns), event.amount);
  }
  std::string args;
  if (event.bytes != 0) args += fmt::format(R"("bytes":{})", event.bytes);
  if (event.index >= 0) args += fmt::format(R"({}"index":{})", args.empty() ? "" : ",", event.index);
  return fmt::format(R"({{"ph":"X","name":{},"pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}}}})", name, options_.rank,
                     event.track + 1, microseconds(event.begin_ns), microseconds(event.amount), args);
}

std::string Trace::chrome_json() const {
  const std::lock_guard lock(mutex_);
  const std::int32_t pid = options_.rank;
  std::string out = R"({"displayTimeUnit":"ns","traceEvents":[)";
  out += '\n' + metadata_json("process_name", pid, 0, fmt::format(R"("name":"rank {}")", pid));
  for (const auto& state : tracks_) {
    const std::int32_t tid = state->id + 1;
    out += ",\n" + metadata_json("thread_name", pid, tid, R"("name":)" + quoted(state->name));
    out += ",\n" + metadata_json("thread_sort_index", pid, tid, fmt::format(R"("sort_index":{})", tid));
  }
  std::vector<std::string> labels;
  for (const std::string& name : labels_) labels.push_back(quoted(name));
  const std::int64_t count = events_ ? recorded() : 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Event& event = events_[static_cast<std::size_t>(i)];
    if (event.ready.load(std::memory_order_acquire) != 0) out += ",\n" + event_json(event, labels);
  }
  out += fmt::format("\n],\"otherData\":{{\"dropped_events\":{}}}}}\n", dropped());
  return out;
}

void Trace::write_chrome_json(const std::filesystem::path& path) const {
  write_whole_file(path, chrome_json());
}

}  // namespace spillway
