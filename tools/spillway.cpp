// SPDX-License-Identifier: Apache-2.0
//
// The spillway program: looks into folders, and at what this machine does.
//
//   spillway inspect FOLDER
//   spillway bench [--set NAME] [--threads N] [--cores LIST]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "tools/bench.h"
#include "tools/inspect.h"

int main(int argc, char** argv) {
  constexpr int kFailed = 1, kUsage = 2;
  CLI::App app("Looks into the folders that Spillway reads and writes, and measures this machine.");
  app.require_subcommand(1);
  std::string folder;
  bool checksums = false;
  CLI::App* inspect = app.add_subcommand("inspect", "describes a model, adapters or a checkpoint, without loading it");
  inspect->add_option("folder", folder, "Hugging Face model, PEFT adapters, checkpoint, or folder of checkpoints")
      ->required();
  inspect->add_flag("--checksums", checksums, "read a checkpoint's files whole and compare their checksums");
  spillway::tools::BenchOptions options;
  CLI::App* bench = app.add_subcommand("bench", "says what the CPU optimizer runs on here, and measures its speed");
  bench->add_option("--set", options.instruction_set, "instruction set of the kernels [the fastest]");
  bench->add_option("--threads", options.threads, "of the CPU optimizer [half the cores]")->check(CLI::Range(0, 4096));
  bench->add_option("--cores", options.cores, "that they stay on, such as 0-3,8; any: anywhere [chosen]");
  bench->add_option("--parameters", options.parameters, "how many to update")->check(CLI::Range(1024L, 4000000000L));
  bench->add_option("--rounds", options.rounds, "of which the median is taken")->check(CLI::Range(1, 10000));
  try {
    app.parse(argc, argv);
    const std::string text =
        bench->parsed() ? spillway::tools::bench(options) : spillway::tools::inspect(folder, checksums);
    std::fputs(text.c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "spillway: %s\n", error.what());
    return kFailed;
  }
}
