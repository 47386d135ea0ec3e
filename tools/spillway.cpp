// SPDX-License-Identifier: Apache-2.0
//
// The spillway program: looks into folders.
//
//   spillway inspect FOLDER
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "tools/inspect.h"

int main(int argc, char** argv) {
  constexpr int kFailed = 1, kUsage = 2;
  CLI::App app("Looks into the folders that Spillway reads and writes.");
  app.require_subcommand(1);
  std::string folder;
  bool checksums = false;
  CLI::App* inspect = app.add_subcommand("inspect", "describes a model, adapters or a checkpoint, without loading it");
  inspect->add_option("folder", folder, "Hugging Face model, PEFT adapters, checkpoint, or folder of checkpoints")
      ->required();
  inspect->add_flag("--checksums", checksums, "read a checkpoint's files whole and compare their checksums");
  try {
    app.parse(argc, argv);
    std::fputs(spillway::tools::inspect(folder, checksums).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "spillway: %s\n", error.what());
    return kFailed;
  }
}
