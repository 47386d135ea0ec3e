// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <mutex>

namespace spillway {

/// MPI of this process, of which there is one: it starts once and ends with the process. Ranks that failed, or that
/// leave while a communicator is alive, end with MPI_Abort, so that the launcher ends the others and returns an error.
class MpiProcess {
 public:
  /// Starts MPI where nobody has. Throws: StateError where it has ended, or runs without support for threads.
  static MpiProcess& get();

  /// Every call of MPI is made under this: it is asked for one thread at a time alone.
  std::mutex& mutex() { return mutex_; }
  /// Communicators that are alive, and whether one of them has failed.
  void opened();
  void closed(bool orderly);

 private:
  MpiProcess();
  static void leave();

  std::mutex mutex_;
  bool owns_ = false;
  int open_ = 0;
  bool failed_ = false;
};

/// Throws: RankError with MPI's words for a code other than MPI_SUCCESS.
void check_mpi(int code, const char* what);

}  // namespace spillway
