// SPDX-License-Identifier: Apache-2.0
//
// offload_bench: what a machine can offload. Copies between tiers, the optimizer on the CPU, what compute, copies and
// optimizer cost each other, and a whole training step, resident and offloaded.
//
//   offload_bench --link-bandwidth 12GB/s --json here.json
//
// Prints one table; exit codes: 0 done, 1 failed, 2 wrong usage.
#include <cstdio>
#include <exception>
#include <fstream>

#include "benchmarks/offload/sections.h"
#include "spillway/core/error.h"

namespace {

using namespace spillway::bench;

constexpr int kFailed = 1, kUsage = 2;

Report measure(const Options& options) {
  Report report;
  report.machine = machine_facts();
  const auto say = [](const char* what) { std::fprintf(stderr, "measuring %s\n", what); };
  say("copies");
  report.copies = measure_copies(options);
  say("the optimizer");
  report.adam = measure_adam(options);
  say("what they cost each other");
  report.interference = measure_interference(options);
  say("a training step");
  report.steps = measure_steps(options);
  return report;
}

void write(const std::string& file, const std::string& text) {
  std::ofstream stream(file, std::ios::trunc);
  if (!(stream << text << std::flush)) throw spillway::FileError("--json " + file + ": cannot write there");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    int exit_code = 0;
    const auto options = parse_options(argc, argv, exit_code);
    if (!options) return exit_code;
    const Report report = measure(*options);
    std::fputs(table(report, *options).c_str(), stdout);
    if (!options->json.empty()) write(options->json, json(report, *options));
    return 0;
  } catch (const spillway::InvalidArgument& error) {
    std::fprintf(stderr, "offload_bench: %s\n", error.what());
    return kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "offload_bench: %s\n", error.what());
    return kFailed;
  }
}
