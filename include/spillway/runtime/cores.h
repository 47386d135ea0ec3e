// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace spillway {

/// A physical core that this process may use: the first of its processors (hardware threads) that it may run on.
struct Core {
  int processor = 0;
  int node = 0;  // of NUMA
};

/// What a process finds on its host. Owns: nothing.
struct HostCores {
  std::vector<Core> cores = {};  // ascending by node and processor
  int processors = 0;            // that this process may run on
  int limit = 0;                 // whole processors that a container's limit allows; 0: no limit
  int online = 0;                // processors of the host, this process's or not; 0: unknown
};

/// Reads topology and limits below `root` (tests give one of their own). `allowed`: the processors that this process
/// may run on; not given: those that the system says. Where the topology is not told, every processor is a core of
/// node 0.
HostCores read_host_cores(const std::filesystem::path& root = "/", const std::optional<std::vector<int>>& allowed = {});

/// What the CPU optimizer's threads are to run on.
struct CoreRequest {
  int threads = 0;         // 0: half of the cores at hand
  std::string cores = {};  // "": chosen; "any": threads are kept nowhere; else all processes' processors, "0-3,8"
  int local_rank = 0, local_size = 1;  // which process of how many on this host, that share the cores
};

/// The answer: how many threads, and the processor of each; none where they run anywhere.
struct CorePlan {
  int threads = 1;
  std::vector<int> processors = {};
  std::string description = {};  // for people, "2 threads on cores 6,7 of node 0"
};

/// Shares cores out: each process of a host has its own; threads take the last cores of one NUMA node, so that compute
/// threads find the first ones free. More threads than cores are kept nowhere, nor are those of more processes than
/// cores; where such a process may not run on all processors of its host, its launcher is taken to have bound it, and
/// its cores to be its own. A list is shared out in its order, equal parts. Throws: InvalidArgument for a list that is
/// none, or shorter than the threads of all processes of the host.
CorePlan plan_cores(const CoreRequest& request, const HostCores& host = read_host_cores());

/// Processors of a list such as "0-3,8", ascending. Throws: InvalidArgument where `text` is no such list.
std::vector<int> parse_processors(const std::string& text);

}  // namespace spillway
