// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "spillway/comm/communicator.h"
#include "spillway/comm/launch.h"
#include "spillway/comm/store.h"

namespace spillway {

/// A world of one rank. Takes streams too: copies go to the stream they are given.
std::unique_ptr<Communicator> make_one_rank();

/// Ranks that are threads of this process: one communicator each. Throws: InvalidArgument below one.
std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int size, CommOptions options = {});

/// Why processes cannot be ranks through MPI: a build without it. Empty where they can.
std::string why_no_mpi();

/// The ranks of an MPI run: processes of one host or several, data in host memory. Starts MPI where nobody has, and
/// ends it when the process ends: with MPI_Abort where this rank failed, so that the launcher ends the others. Blocks:
/// until all ranks have called. Throws: InvalidArgument with why_no_mpi's reason.
std::unique_ptr<Communicator> make_mpi_communicator(const CommOptions& options = {});

/// Why processes cannot be ranks through NCCL, GPUs aside: a build without it, or no library of its version here. Empty
/// where they can.
std::string why_no_nccl();

/// Ranks with a GPU each: verbs take device memory and a stream; small exchanges go through `store`, which must outlive
/// it. NCCL is the one that is in the process already, else the one that the loader finds. Work on the device that
/// waits beyond the timeout is broken off; the next call throws. Each ordinal is one rank's alone. Blocks: until all
/// ranks have called. Throws: InvalidArgument with why_no_nccl's reason or as find_gpu; RankError.
std::unique_ptr<Communicator> make_nccl_communicator(const Launch& launch, Store& store, int ordinal,
                                                     const CommOptions& options = {});

}  // namespace spillway
