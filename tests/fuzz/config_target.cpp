// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "fuzz/targets.h"
#include "spillway/core/config_file.h"
#include "spillway/core/error.h"

namespace spillway::fuzz {

bool config(std::span<const std::byte> input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    LoadedConfig loaded = parse_config(text, "run.json");
    if (loaded.config.lr_schedule.kind != LrScheduleConfig::Kind::constant &&
        loaded.config.lr_schedule.total_steps == 0) {
      return true;  // the program's to give
    }
    const std::string written = to_json(loaded.config, loaded.origins);
    check(to_json(Config::parse(written, "again.json"), loaded.origins) == written, "what is written is read back");
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

}  // namespace spillway::fuzz
