// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "fuzz/target_support.h"
#include "fuzz/targets.h"
#include "spillway/core/config_file.h"

namespace spillway::fuzz {

bool config(std::span<const std::byte> input) {
  try {
    LoadedConfig loaded = parse_config(text_of(input), "run.json");
    if (loaded.config.lr_schedule.kind != LrScheduleConfig::Kind::constant &&
        loaded.config.lr_schedule.total_steps == 0) {
      return true;  // the program's to give
    }
    for (const std::string& warning : loaded.warnings) check_printable(warning);
    const std::string written = to_json(loaded.config, loaded.origins);
    check(to_json(Config::parse(written, "again.json"), loaded.origins) == written, "what is written is read back");
    return true;
  } catch (const InvalidArgument& error) {
    return refused(error);
  }
}

}  // namespace spillway::fuzz
