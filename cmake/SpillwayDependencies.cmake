# Finds what Spillway needs (always) and what it can use (SPILLWAY_<PART> AUTO/ON/OFF). Nothing is downloaded here:
# scripts/setup.sh installs what is missing.

function(spillway_missing part what)
  message(FATAL_ERROR "SPILLWAY_${part} is ON but ${what} was not found. Run scripts/setup.sh, or set SPILLWAY_${part} to AUTO or OFF.")
endfunction()

set(THREADS_PREFER_PTHREAD_FLAG ON)
foreach(package fmt nlohmann_json spdlog)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "${package} was not found. Run scripts/setup.sh (Debian: lib${package}-dev or nlohmann-json3-dev).")
  endif()
endforeach()
find_package(Threads REQUIRED)
find_path(SPILLWAY_XXHASH_INCLUDE xxhash.h)  # its header alone is compiled in
if(NOT SPILLWAY_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxhash.h was not found. Run scripts/setup.sh (Debian: libxxhash-dev).")
endif()

# ---- CUDA toolkit ----------------------------------------------------------------------------------------------------
set(SPILLWAY_WITH_CUDA OFF)
if(NOT SPILLWAY_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    set(SPILLWAY_WITH_CUDA ON)
  elseif(SPILLWAY_CUDA STREQUAL "ON")
    spillway_missing(CUDA "the CUDA toolkit (nvcc)")
  endif()
endif()

# ---- LibTorch --------------------------------------------------------------------------------------------------------
set(SPILLWAY_WITH_TORCH OFF)
if(NOT SPILLWAY_TORCH STREQUAL "OFF")
  include(FindLibTorch)
  if(SPILLWAY_LIBTORCH_FOUND)
    set(SPILLWAY_WITH_TORCH ON)
  elseif(SPILLWAY_TORCH STREQUAL "ON" AND SPILLWAY_LIBTORCH_REFUSED)
    message(FATAL_ERROR "SPILLWAY_TORCH is ON, but ${SPILLWAY_LIBTORCH_REFUSED}.")
  elseif(SPILLWAY_LIBTORCH_REFUSED)
    message(STATUS "  LibTorch is left out: ${SPILLWAY_LIBTORCH_REFUSED}")
  elseif(SPILLWAY_TORCH STREQUAL "ON")
    spillway_missing(TORCH "LibTorch (looked at Torch_DIR, CMAKE_PREFIX_PATH, .venv and python3's torch)")
  endif()
endif()

# ---- MPI -------------------------------------------------------------------------------------------------------------
set(SPILLWAY_WITH_MPI OFF)
if(NOT SPILLWAY_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(SPILLWAY_WITH_MPI ON)
  elseif(SPILLWAY_MPI STREQUAL "ON")
    spillway_missing(MPI "an MPI library (Debian: libopenmpi-dev)")
  endif()
endif()

# ---- NCCL ------------------------------------------------------------------------------------------------------------
# Its header alone: the library is opened when ranks with GPUs start, and is LibTorch's where that is in the process.
set(SPILLWAY_WITH_NCCL OFF)
if(SPILLWAY_WITH_CUDA AND NOT SPILLWAY_NCCL STREQUAL "OFF")
  find_path(SPILLWAY_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} "${SPILLWAY_LIBTORCH_ROOT}/../nvidia/nccl/include")
  if(SPILLWAY_NCCL_INCLUDE)
    set(SPILLWAY_WITH_NCCL ON)
  endif()
endif()
if(SPILLWAY_NCCL STREQUAL "ON" AND NOT SPILLWAY_WITH_NCCL)
  spillway_missing(NCCL "CUDA with NCCL's header nccl.h")
endif()

# ---- io_uring --------------------------------------------------------------------------------------------------------
set(SPILLWAY_WITH_IO_URING OFF)
if(NOT SPILLWAY_IO_URING STREQUAL "OFF")
  find_path(SPILLWAY_URING_INCLUDE liburing.h)
  find_library(SPILLWAY_URING_LIBRARY uring)
  if(SPILLWAY_URING_INCLUDE AND SPILLWAY_URING_LIBRARY)
    set(SPILLWAY_WITH_IO_URING ON)
  elseif(SPILLWAY_IO_URING STREQUAL "ON")
    spillway_missing(IO_URING "liburing (Debian: liburing-dev)")
  endif()
endif()

# One line an optional part: what is used, or why it is not and what takes its place.
function(_spillway_summary_line part label used instead)
  if(SPILLWAY_WITH_${part})
    message(STATUS "  ${label} ${used}")
  elseif(SPILLWAY_${part} STREQUAL "OFF")
    message(STATUS "  ${label} off (SPILLWAY_${part}=OFF): ${instead}")
  else()
    message(STATUS "  ${label} not found: ${instead}")
  endif()
endfunction()

function(spillway_print_summary)
  message(STATUS "Spillway ${PROJECT_VERSION}: ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  _spillway_summary_line(TORCH "LibTorch:  " "${SPILLWAY_LIBTORCH_VERSION} in ${SPILLWAY_LIBTORCH_ROOT}"
                         "the core alone is built (planner and simulator)")
  _spillway_summary_line(CUDA "CUDA:      " "${CUDAToolkit_VERSION}" "devices are emulated")
  _spillway_summary_line(MPI "MPI:       " "${MPI_CXX_VERSION}" "ranks are threads of one process")
  _spillway_summary_line(NCCL "NCCL:      " "${SPILLWAY_NCCL_INCLUDE}" "ranks have no GPUs")
  _spillway_summary_line(IO_URING "io_uring:  " "${SPILLWAY_URING_LIBRARY}" "files are read and written by threads")
  message(STATUS "  tests ${SPILLWAY_TESTS}, examples ${SPILLWAY_EXAMPLES}, benchmarks ${SPILLWAY_BENCHMARKS}, "
                 "warnings are errors ${SPILLWAY_WERROR}, sanitizers \"${SPILLWAY_SANITIZE}\"")
endfunction()
