// SPDX-License-Identifier: Apache-2.0
#include "spillway/runtime/cores.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <set>

#include "lane/affinity.h"
#include "runtime/control_groups.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

int parse_number(std::string_view text, const std::string& whole) {
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool good = error == std::errc() && end == text.data() + text.size() && number >= 0;
  require(good && number < kMostProcessors, fmt::format("\"{}\" is no list of processors such as 0-3,8", whole));
  return number;
}

// What the kernel writes; empty where it writes nothing that can be read.
std::vector<int> list_in(const fs::path& file) {
  try {
    return parse_processors(first_line(file));
  } catch (const Error&) {
    return {};
  }
}

std::map<int, int> nodes_by_processor(const fs::path& root) {
  std::map<int, int> nodes;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root / "sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node") || name.find_first_not_of("0123456789", 4) != std::string::npos || name.size() < 5) {
      continue;
    }
    for (int processor : list_in(entry.path() / "cpulist")) nodes[processor] = parse_number(name.substr(4), name);
  }
  return nodes;
}

/// The lowest processor of the core that `processor` belongs to.
int core_of(const fs::path& root, int processor) {
  const fs::path topology = root / fmt::format("sys/devices/system/cpu/cpu{}/topology", processor);
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {
    const std::vector<int> siblings = list_in(topology / name);
    if (!siblings.empty()) return siblings.front();
  }
  return processor;
}

// "max 100000" or "150000 100000": quota and period in microseconds. 0 where there is no limit.
double processors_of_quota(const std::string& quota, double period) {
  double value = 0;
  const auto [end, error] = std::from_chars(quota.data(), quota.data() + quota.size(), value);
  return error == std::errc() && end != quota.data() && value > 0 && period > 0 ? value / period : 0;
}

double quota_in(const fs::path& folder) {
  std::ifstream second(folder / "cpu.max");
  std::string quota;
  double period = 0;
  if (second >> quota >> period) return processors_of_quota(quota, period);
  std::ifstream period_file(folder / "cpu.cfs_period_us");
  if (!(period_file >> period)) return 0;
  return processors_of_quota(first_line(folder / "cpu.cfs_quota_us"), period);
}

/// A container's limit in whole processors, at least one; 0 where there is none. Both versions of control groups.
int container_limit(const fs::path& root) {
  double least = 0;
  for (const fs::path& group : control_groups(root, "cpu")) {
    const double limit = quota_in(group);
    if (limit > 0 && (least == 0 || limit < least)) least = limit;
  }
  return least > 0 ? std::max(1, static_cast<int>(least)) : 0;
}

std::string joined(const std::vector<int>& processors) {
  return fmt::format("{}", fmt::join(processors, ","));
}

// ---- the share of one process --------------------------------------------------------------------

/// Equal parts of what the processes of a host share, this one's.
template <class Item>
std::vector<Item> part_of(const std::vector<Item>& all, const CoreRequest& request) {
  const auto size = static_cast<std::int64_t>(all.size());
  const std::int64_t begin = size * request.local_rank / request.local_size;
  const std::int64_t end = size * (request.local_rank + 1) / request.local_size;
  return {all.begin() + begin, all.begin() + end};
}

/// The cores of the node that has most of them.
std::vector<Core> largest_node(const std::vector<Core>& cores) {
  std::map<int, std::vector<Core>> nodes;
  for (const Core& core : cores) nodes[core.node].push_back(core);
  std::vector<Core> best;
  for (const auto& [node, members] : nodes) {
    if (members.size() > best.size()) best = members;
  }
  return best;
}

CorePlan anywhere(int threads, const std::string& why) {
  return {threads, {}, fmt::format("{} {} anywhere: {}", threads, threads == 1 ? "thread" : "threads", why)};
}

/// Threads of processes that have less than a core each, as far as is seen here. They inherit what the process is bound
/// to, and only the system can spread them over it: where a container rather than the launcher bound all processes to
/// the same cores, each would choose the same of them.
CorePlan among_the_allowed(int threads, bool bound, const CoreRequest& request, const HostCores& host) {
  const std::string cores = fmt::format("{} {}", host.cores.size(), host.cores.size() == 1 ? "core" : "cores");
  if (!bound) return anywhere(threads, fmt::format("{} processes share {}", request.local_size, cores));
  return anywhere(threads, fmt::format("this process is bound to {}", cores));
}

CorePlan on_processors(std::vector<int> processors, const std::string& where) {
  const int threads = static_cast<int>(processors.size());
  const std::string text = fmt::format("{} {} on {} {}{}", threads, threads == 1 ? "thread" : "threads",
                                       threads == 1 ? "core" : "cores", joined(processors), where);
  return {threads, std::move(processors), text};
}

CorePlan on_given(const CoreRequest& request) {
  const std::vector<int> listed = parse_processors(request.cores);
  const auto count = static_cast<std::int64_t>(listed.size());
  const std::int64_t needed = static_cast<std::int64_t>(std::max(1, request.threads)) * request.local_size;
  const std::string of_each =
      request.local_size == 1 ? "" : fmt::format(" in each of the {} processes of this host", request.local_size);
  require(needed <= count || request.threads == 0,
          fmt::format("{} optimizer threads were asked for{}, and cores \"{}\" for them, which are {}; expected at "
                      "least {}: give more cores, or fewer threads",
                      request.threads, of_each, request.cores, count, needed));
  require(needed <= count, fmt::format("cores \"{}\" were asked for, which are {}; expected at least {}: the {} "
                                       "processes of this host share them, each with its own",
                                       request.cores, count, needed, request.local_size));
  std::vector<int> processors = part_of(listed, request);
  if (request.threads > 0) processors.resize(static_cast<std::size_t>(request.threads));
  return on_processors(std::move(processors), " as asked for");
}

/// Threads where none were asked for: half the cores, and no more than half of what a container allows.
int default_threads(const std::vector<Core>& cores, const CoreRequest& request, const HostCores& host) {
  int available = static_cast<int>(cores.size());
  if (host.limit > 0) available = std::min(available, std::max(1, host.limit / request.local_size));
  return std::max(1, available / 2);
}

}  // namespace

std::vector<int> parse_processors(const std::string& text) {
  std::set<int> processors;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view part = std::string_view(text).substr(begin, comma - begin);
    const std::size_t dash = part.find('-');
    const int first = parse_number(part.substr(0, dash), text);
    const int last = dash == std::string_view::npos ? first : parse_number(part.substr(dash + 1), text);
    require(first <= last, fmt::format("\"{}\" is no list of processors: {} is above {}", text, first, last));
    for (int i = first; i <= last; ++i) processors.insert(i);
    if (comma == text.size()) break;
    begin = comma + 1;
  }
  return {processors.begin(), processors.end()};
}

HostCores read_host_cores(const fs::path& root, const std::optional<std::vector<int>>& allowed) {
  std::vector<int> processors = allowed ? *allowed : allowed_processors();
  if (processors.empty()) processors = {0};
  const std::map<int, int> nodes = nodes_by_processor(root);
  std::map<int, int> first_of_core;  // by the core's lowest processor, which this process need not be allowed
  for (int processor : processors) first_of_core.emplace(core_of(root, processor), processor);
  HostCores host{{},
                 static_cast<int>(processors.size()),
                 container_limit(root),
                 static_cast<int>(list_in(root / "sys/devices/system/cpu/online").size())};
  for (const auto& [core, processor] : first_of_core) {
    const auto node = nodes.find(processor);
    host.cores.push_back({processor, node == nodes.end() ? 0 : node->second});
  }
  std::ranges::sort(host.cores, {}, [](const Core& core) { return std::pair(core.node, core.processor); });
  return host;
}

CorePlan plan_cores(const CoreRequest& request, const HostCores& host) {
  require(request.local_size >= 1 && request.local_rank >= 0 && request.local_rank < request.local_size,
          fmt::format("process {} of {} on this host makes no sense", request.local_rank, request.local_size));
  require(request.threads >= 0, fmt::format("{} optimizer threads were asked for", request.threads));
  if (!request.cores.empty() && request.cores != "any") return on_given(request);
  // A launcher may have bound each process to a few cores of its own, which are then no others' to share.
  const bool crowded = static_cast<int>(host.cores.size()) < request.local_size;
  const bool bound = crowded && host.processors < host.online;
  const std::vector<Core> share = bound ? host.cores : part_of(host.cores, request);
  const int threads = request.threads > 0 ? request.threads : default_threads(share, request, host);
  if (request.cores == "any") return anywhere(threads, "as asked for");
  if (crowded) return among_the_allowed(threads, bound, request, host);
  const std::vector<Core> node = largest_node(share);
  // Threads beyond one node go over all cores of the share rather than two to a core.
  const std::vector<Core>& from = threads <= static_cast<int>(node.size()) ? node : share;
  if (threads > static_cast<int>(from.size())) {
    return anywhere(threads, fmt::format("there are {} cores for them", from.size()));
  }
  std::vector<int> processors;
  for (std::size_t i = from.size() - static_cast<std::size_t>(threads); i < from.size(); ++i) {
    processors.push_back(from[i].processor);
  }
  const bool one_node = from.front().node == from.back().node;
  return on_processors(std::move(processors),
                       one_node ? fmt::format(" of node {}", from.back().node) : " of all nodes");
}

}  // namespace spillway
