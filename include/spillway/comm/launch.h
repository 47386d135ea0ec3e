// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "spillway/comm/communicator.h"

namespace spillway {

/// What started this process.
enum class Launcher : unsigned char { none, torchrun, mpirun, srun };
std::string_view to_string(Launcher launcher);

/// A rank's place in its run, and where the ranks meet.
struct Launch {
  Launcher launcher = Launcher::none;
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  /// The host of rank 0, where a store listens; empty where ranks are on several hosts and nobody said.
  std::string master_address = "127.0.0.1";
  int master_port = 29500;
  bool store_runs = false;  // the launcher's own store listens there already
  int attempt = 0;          // torchrun starts all ranks anew after a failure
};

using Variables = std::map<std::string, std::string, std::less<>>;

/// The variables that launchers set, as they are in the environment of this process.
Variables launch_variables();

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (torchrun), OMPI_COMM_WORLD_* (mpirun) or SLURM_* (srun), and
/// MASTER_ADDR and MASTER_PORT. The launcher nearest to the process counts: torchrun started by srun is torchrun.
/// Without any, one rank. Throws: InvalidArgument naming the variable that is missing, no number, out of range, or says
/// something else than another's, and where none is set but PMI_SIZE counts several processes of another launcher.
Launch read_launch(const Variables& variables);

/// Ranks of host processes: MPI, or one rank. Throws: InvalidArgument for torchrun, which starts no MPI, with more than
/// one rank; where this build has no MPI; or where MPI sees other ranks than `launch`.
std::unique_ptr<Communicator> make_host_communicator(const Launch& launch, const CommOptions& options = {});

}  // namespace spillway
