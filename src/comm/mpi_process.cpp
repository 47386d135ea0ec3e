// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_process.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "spillway/core/error.h"

namespace spillway {
namespace {

// The others print what they were told, before the launcher ends them.
constexpr auto kGrace = std::chrono::milliseconds(300);

}  // namespace

MpiProcess& MpiProcess::get() {
  static MpiProcess process;
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended != 0) throw StateError("MPI has ended in this process, and cannot be started again");
  return process;
}

MpiProcess::MpiProcess() {
  int started = 0, threads = MPI_THREAD_SINGLE;
  check_mpi(MPI_Initialized(&started), "asking whether MPI runs");
  if (started == 0) {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads), "starting MPI");
    owns_ = true;
  } else {
    check_mpi(MPI_Query_thread(&threads), "asking for MPI's threads");
  }
  if (threads < MPI_THREAD_SERIALIZED)
    throw StateError("MPI runs without support for threads: start it with MPI_Init_thread(MPI_THREAD_SERIALIZED)");
  // Runs after main has returned, so that what it says of the failure is said.
  std::atexit(leave);
}

void MpiProcess::opened() {
  const std::scoped_lock lock(mutex_);
  ++open_;
}

void MpiProcess::closed(bool orderly) {
  const std::scoped_lock lock(mutex_);
  --open_;
  failed_ = failed_ || !orderly;
}

void MpiProcess::leave() {
  // The program may have ended MPI itself, after which nothing may be asked of it, and nobody is left to catch.
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended != 0) return;
  MpiProcess& process = get();
  if (process.failed_ || process.open_ > 0) {
    std::this_thread::sleep_for(kGrace);
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  if (process.owns_) MPI_Finalize();
}

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw RankError(
      fmt::format("MPI failed at {}: {}", what, std::string_view(text.data(), static_cast<std::size_t>(length))));
}

}  // namespace spillway
