// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace spillway {
namespace {

// spdlog's registry keeps the logger; a program that registers one named "spillway" first has its own used.
std::shared_ptr<spdlog::logger> default_logger() {
  std::shared_ptr<spdlog::logger> logger = spdlog::get("spillway");
  if (logger) return logger;
  try {
    return spdlog::stderr_color_mt("spillway");
  } catch (const spdlog::spdlog_ex&) {  // another thread was first
    return spdlog::get("spillway");
  }
}

}  // namespace

void log(const LogHandler& handler, LogLevel level, const std::string& message) {
  if (handler) {
    handler(level, message);
    return;
  }
  const auto spdlog_level = level == LogLevel::error     ? spdlog::level::err
                            : level == LogLevel::warning ? spdlog::level::warn
                                                         : spdlog::level::info;
  default_logger()->log(spdlog_level, "{}", message);
}

}  // namespace spillway
