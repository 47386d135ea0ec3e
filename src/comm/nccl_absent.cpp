// SPDX-License-Identifier: Apache-2.0
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"

namespace spillway {

std::string why_no_nccl() {
  return "this build has no NCCL (CUDA or nccl.h was not found, or left out, when it was configured)";
}

std::unique_ptr<Communicator> make_nccl_communicator(const Launch&, Store&, int, const CommOptions&) {
  throw InvalidArgument("ranks with GPUs need NCCL, but " + why_no_nccl());
}

}  // namespace spillway
