// SPDX-License-Identifier: Apache-2.0
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"

namespace spillway {

std::string why_no_mpi() {
  return "this build has no MPI (no MPI library was found, or it was left out, when it was configured)";
}

std::unique_ptr<Communicator> make_mpi_communicator(const CommOptions&) {
  throw InvalidArgument("ranks as processes need MPI, but " + why_no_mpi() +
                        ": install libopenmpi-dev and configure with SPILLWAY_MPI=ON");
}

}  // namespace spillway
