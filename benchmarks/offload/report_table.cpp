// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "benchmarks/offload/sections.h"

namespace spillway::bench {
namespace {

/// "12.3 (11.9..12.6)": the median, and the quarter of the samples below and above it cut off.
std::string show(const Spread& s) {
  return fmt::format("{:.4g} ({:.4g}..{:.4g})", s.median, s.q25, s.q75);
}

std::string copies_table(const Report& report) {
  std::string out = "\nCopies, GB/s: median (middle half of the samples)\n";
  out += fmt::format("  {:<8}{:>10}  {:<5}{:<28}{:<28}\n", "tier", "size", "", "alone", "both ways at once");
  for (const CopyResult& c : report.copies) {
    out += fmt::format("  {:<8}{:>10}  {:<5}{:<28}{:<28}\n", to_string(c.tier), to_string(c.size),
                       to_string(c.direction), show(c.alone), show(c.with_the_other));
  }
  return out;
}

std::string adam_table(const Report& report, const Options& options) {
  std::string out = fmt::format("\nAdam on the CPU, fp32 states and gradients, {} parameters\n", options.parameters);
  out += fmt::format("  {:<9}{:<14}{:<28}{:<28}\n", "threads", "working copy", "ns a parameter", "GB/s");
  for (const AdamResult& a : report.adam) {
    out += fmt::format("  {:<9}{:<14}{:<28}{:<28}\n", a.threads, a.bf16_copy ? "bf16" : "fp32",
                       show(a.ns_per_parameter), show(a.gb_per_second));
  }
  return out + "  (an fp32 working copy is the master itself: nothing is written beside it)\n";
}

/// The set of two activities, in the order in which sets are named.
std::string pair_of(std::string_view a, std::string_view b) {
  for (std::string_view first : {"compute", "copies"}) {
    if (b == first) std::swap(a, b);
    if (a == first) break;
  }
  return fmt::format("{}+{}", a, b);
}

/// One row of slowdowns: what an activity of the set `own` costs beside others.
std::string slowdown_row(const Interference& in, const std::string& own, const std::string& activity) {
  std::string out = fmt::format("  {:<9}{:>9.3f} ms", activity, in.sets.at(own).at(activity).median * 1e3);
  for (std::string_view other : {"compute", "copies", "adam"}) {
    out += other == own ? fmt::format("{:>13}", "-")
                        : fmt::format("{:>13.2f}", in.slowdown(activity, pair_of(own, other)));
  }
  return out + fmt::format("{:>13.2f}\n", in.slowdown(activity, "compute+copies+adam"));
}

std::string interference_table(const Report& report, const Options& options) {
  const Interference& in = report.interference;
  std::string out = fmt::format(
      "\nHow many times slower beside others: products of {0} x {0} ({1} threads), copies of {2} both ways, Adam ({3} "
      "threads, bf16 copy)\n",
      options.matmul, options.compute_threads, to_string(Bytes{in.copy_bytes}), in.adam_threads);
  out +=
      fmt::format("  {:<9}{:>12}{:>13}{:>13}{:>13}{:>13}\n", "", "alone", "compute", "copies", "adam", "both others");
  out += slowdown_row(in, "compute", "compute") + slowdown_row(in, "copies", "h2d");
  out += slowdown_row(in, "copies", "d2h") + slowdown_row(in, "adam", "adam");
  return out;
}

std::string steps_table(const Report& report) {
  const StepComparison& steps = report.steps;
  std::string out = fmt::format("\nA training step of {} parameters and {} tokens, fp32, ms (busy time by lane)\n",
                                steps.parameters, steps.tokens);
  for (const StepSchedule& s : steps.schedules) {
    Spread ms = s.seconds;
    for (double* value : {&ms.median, &ms.q25, &ms.q75}) *value *= 1e3;
    out +=
        fmt::format("  {:<14}{:<28} device peak {:<10}", s.schedule, show(ms), to_string(Bytes{s.device_peak_bytes}));
    for (const auto& [lane, seconds] : s.busy_seconds) out += fmt::format("  {} {:.3g}", lane, seconds * 1e3);
    out += "\n";
  }
  return out + fmt::format("  zero_offload / resident: {:.2f}\n",
                           steps.schedules.back().seconds.median / steps.schedules.front().seconds.median);
}

}  // namespace

std::string table(const Report& report, const Options& options) {
  const MachineFacts& m = report.machine;
  std::string out = fmt::format("{}, {} cores, {} kernels, {} memory free", m.processor, m.cores, m.instruction_set,
                                m.memory_bytes < 0 ? "unknown" : to_string(Bytes{m.memory_bytes}));
  out += fmt::format("; load {:.2f} at the start{}\n", m.load,
                     m.load > 0.3 ? " (other programs run: figures below are of a shared machine)" : "");
  return out + copies_table(report) + adam_table(report, options) + interference_table(report, options) +
         steps_table(report);
}

}  // namespace spillway::bench
