// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "spillway/comm/launch.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"

namespace spillway {

std::unique_ptr<Communicator> make_host_communicator(const Launch& launch, const CommOptions& options) {
  if (launch.size == 1) return make_one_rank();
  require(launch.launcher != Launcher::torchrun,
          fmt::format("torchrun started {} ranks, but host processes talk through MPI, which torchrun does not start: "
                      "use  mpirun -n {} PROGRAM  or  srun -n {} PROGRAM  (torchrun is for ranks with a GPU each)",
                      launch.size, launch.size, launch.size));
  require(launch.launcher != Launcher::none,
          fmt::format("{} ranks were asked for, but no launcher started them: use mpirun or srun", launch.size));
  auto communicator = make_mpi_communicator(options);
  if (communicator->rank() != launch.rank || communicator->size() != launch.size) {
    const std::string why = fmt::format(
        "{} says that this is rank {} of {}, but MPI makes it rank {} of {}: start the program with the mpirun of the "
        "MPI "
        "that Spillway was built with (under srun, that MPI needs Slurm's PMI: srun --mpi=pmix)",
        to_string(launch.launcher), launch.rank, launch.size, communicator->rank(), communicator->size());
    communicator->fail(why);
    throw InvalidArgument(why);
  }
  return communicator;
}

}  // namespace spillway
