// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr const char* kName = "libnccl.so.2";

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  require(function != nullptr, fmt::format("{} has no function {}: it is not the NCCL {}.{} that is needed", kName,
                                           name, NCCL_MAJOR, NCCL_MINOR));
}

NcclLibrary load() {
  void* library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw InvalidArgument(
        fmt::format("ranks with GPUs need NCCL, but {} was not found ({}): install NVIDIA's NCCL, or "
                    "name its folder in LD_LIBRARY_PATH",
                    kName, dlerror()));
  }
  NcclLibrary nccl;
  find(library, nccl.get_version, "ncclGetVersion");
  int version = 0;
  nccl.get_version(&version);
  require(version >= NCCL_VERSION_CODE, fmt::format("{} is version {}, but Spillway was compiled for {}: use that or a "
                                                    "newer one",
                                                    kName, version, NCCL_VERSION_CODE));
  find(library, nccl.error_string, "ncclGetErrorString");
  find(library, nccl.last_error, "ncclGetLastError");
  find(library, nccl.get_unique_id, "ncclGetUniqueId");
  find(library, nccl.init, "ncclCommInitRankConfig");
  find(library, nccl.finalize, "ncclCommFinalize");
  find(library, nccl.destroy, "ncclCommDestroy");
  find(library, nccl.abort, "ncclCommAbort");
  find(library, nccl.async_error, "ncclCommGetAsyncError");
  find(library, nccl.group_start, "ncclGroupStart");
  find(library, nccl.group_end, "ncclGroupEnd");
  find(library, nccl.send, "ncclSend");
  find(library, nccl.receive, "ncclRecv");
  find(library, nccl.all_gather, "ncclAllGather");
  find(library, nccl.reduce_scatter, "ncclReduceScatter");
  find(library, nccl.reduce, "ncclReduce");
  find(library, nccl.all_reduce, "ncclAllReduce");
  find(library, nccl.broadcast, "ncclBroadcast");
  return nccl;
}

}  // namespace

const NcclLibrary& NcclLibrary::get() {
  static const NcclLibrary nccl = load();
  return nccl;
}

}  // namespace spillway
