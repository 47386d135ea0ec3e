// SPDX-License-Identifier: Apache-2.0
//
// finetune under mpirun, srun or torchrun.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "finetune.h"
#include "spillway/core/error.h"

namespace finetune {

void add_rank_flags(CLI::App& app, Options& o) {
  app.add_option("--stage", o.stage,
                 "how ranks share states: 0 not, 1 masters and optimizer states, 2 gradients too [2]")
      ->check(CLI::Range(0, 2));
  app.add_option("--bucket-chunks", o.bucket_chunks, "chunks of one call between ranks [1]")
      ->check(CLI::PositiveNumber);
  app.add_option("--rank-timeout", o.rank_timeout, "seconds that a rank waits for the others before it gives up")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--ranks", o.ranks, "plan for so many ranks, on one host (--dry-run)")
      ->check(CLI::PositiveNumber)
      ->needs("--dry-run");
}

std::unique_ptr<spillway::Communicator> join_ranks(const Options& o, spillway::Config& config) {
  const spillway::Launch& launch = o.launch;
  if (launch.size == 1) return nullptr;
  spillway::CommOptions options;
  options.timeout = spillway::Seconds{o.rank_timeout};
  if (config.device.kind == spillway::DeviceConfig::Kind::cuda) {
    if (o.device == "cuda" || o.device.empty()) config.device.ordinal = launch.local_rank;
    throw spillway::InvalidArgument("several ranks on GPUs");
  }
  auto ranks = spillway::make_host_communicator(launch, options);
  if (ranks->rank() > 0 && std::freopen("/dev/null", "w", stdout) == nullptr) std::fclose(stdout);
  return ranks;
}

spillway::LogHandler rank_log(const spillway::Communicator* ranks) {
  if (ranks == nullptr || ranks->rank() == 0) return {};
  return [rank = ranks->rank()](spillway::LogLevel level, const std::string& text) {
    if (level == spillway::LogLevel::error) std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
  };
}

spillway::RankPlace place_of(const Options& o, const spillway::Communicator* ranks) {
  if (ranks != nullptr) return {ranks->size(), ranks->rank(), ranks->local_size()};
  const int planned = o.ranks > 0 ? o.ranks : 1;
  return {planned, 0, planned};
}

}  // namespace finetune
