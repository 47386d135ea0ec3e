// SPDX-License-Identifier: Apache-2.0
#include "formats/process_names.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <optional>
#include <random>

namespace spillway {
namespace {

std::string host_prefix() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("{}-", host.data());
}

std::uint32_t run_number() {
  static const std::uint32_t number = std::random_device()();
  return number;
}

// Takes a number and the '-' behind it, if there is one, off the text.
std::optional<std::uint64_t> take_number(std::string_view& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (text.empty()) return number;
  if (text.front() != '-' || text.size() == 1) return std::nullopt;
  text.remove_prefix(1);
  return number;
}

}  // namespace

std::string process_name() {
  static std::atomic<unsigned> counter{0};
  return fmt::format("{}{}-{}-{}", host_prefix(), ::getpid(), run_number(), counter.fetch_add(1));
}

bool is_left_behind(std::string_view name) {
  const std::string prefix = host_prefix();
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  const auto process = take_number(name);
  const auto run = process ? take_number(name) : std::nullopt;
  const auto number = run && !name.empty() ? take_number(name) : std::nullopt;
  if (!number || !name.empty() || *process == 0 || *process > 0x7fffffff) return false;  // of another host, perhaps
  if (static_cast<pid_t>(*process) == ::getpid()) return *run != run_number();
  return ::kill(static_cast<pid_t>(*process), 0) != 0 && errno == ESRCH;
}

}  // namespace spillway
