// SPDX-License-Identifier: Apache-2.0
//
// finetune under mpirun, srun or torchrun.
#include <fmt/format.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "finetune.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"
#include "spillway/device/gpu.h"
#include "spillway/train/tcp_store.h"

namespace finetune {

void add_rank_flags(CLI::App& app, Options& o) {
  app.add_option("--stage", o.stage,
                 "how ranks share states: 0 not, 1 masters and optimizer states, 2 gradients too [2]")
      ->check(CLI::Range(0, 2));
  app.add_option("--bucket-chunks", o.bucket_chunks, "chunks of one call between ranks [1]")
      ->check(CLI::PositiveNumber);
  app.add_flag("--transport-sums", o.transport_sums,
               "sum ranks' gradients as NCCL or MPI does, not in rank order in fp32: other bits");
  app.add_flag(
      "--reduce-last-only", o.reduce_last_only,
      "ranks add their gradients in a step's last micro-batch only, at --stage 0 or 1: for slow networks: less "
      "traffic between ranks, more memory, other bits");
  app.add_option("--rank-timeout", o.rank_timeout, "seconds that a rank waits for the others before it gives up")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--ranks", o.ranks, "plan for so many ranks, on one host (--dry-run)")
      ->check(CLI::PositiveNumber)
      ->needs("--dry-run");
}

namespace {

// Launchers may show each rank its own GPU alone, or all of them. With fewer of several GPUs than ranks it is neither.
int ordinal_of(int local_rank) {
  const std::string reason = spillway::why_no_gpu(local_rank);
  if (reason.empty()) return local_rank;
  if (torch::cuda::device_count() == 1) return 0;
  throw spillway::InvalidArgument(
      fmt::format("rank {} of this host found no usable GPU {}: {}; expected a GPU for each rank of a host. Start as "
                  "many ranks as there are GPUs, or show each its own alone (CUDA_VISIBLE_DEVICES)",
                  local_rank, local_rank, reason));
}

}  // namespace

Ranks join_ranks(const Options& o, spillway::Config& config) {
  const spillway::Launch& launch = o.launch;
  Ranks ranks;
  if (launch.size == 1) return ranks;
  spillway::CommOptions options;
  options.timeout = spillway::Seconds{o.rank_timeout};
  if (config.device.kind == spillway::DeviceConfig::Kind::cuda) {
    if (o.device == "cuda" || o.device.empty()) config.device.ordinal = ordinal_of(launch.local_rank);
    ranks.store = spillway::make_tcp_store(launch, options.timeout);
    ranks.communicator = spillway::make_nccl_communicator(launch, *ranks.store, config.device.ordinal, options);
  } else {
    ranks.communicator = spillway::make_host_communicator(launch, options);
  }
  if (launch.rank > 0 && std::freopen("/dev/null", "w", stdout) == nullptr) std::fclose(stdout);
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
  return {planned, planned - 1, planned};  // the last one keeps most
}

}  // namespace finetune
