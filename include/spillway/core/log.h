// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

namespace spillway {

enum class LogLevel { info, warning, error };

/// Where messages for people go. An empty handler means spdlog's default logger (standard error).
using LogHandler = std::function<void(LogLevel level, const std::string& message)>;

/// Hands `message` to `handler`, or to spdlog where that is empty. Threads: safe where the handler is.
void log(const LogHandler& handler, LogLevel level, const std::string& message);

}  // namespace spillway
