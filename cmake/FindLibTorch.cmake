# Finds LibTorch and makes the target spillway_libtorch. Installed beside Spillway's own configuration too: a program of
# an installed Spillway finds its machine's LibTorch in the same way.
#
# LibTorch's own find_package(Torch) is not used: on a machine without the CUDA toolkit it ends in a fatal error with
# the CUDA build of the wheel, and with the toolkit it probes for GPUs at configure time, which fails where there is
# none. Linking the libraries directly needs neither.
#
# Order: Torch_DIR (…/torch/share/cmake/Torch), CMAKE_PREFIX_PATH (…/torch or …/torch/share/cmake), the .venv of the
# project that asks, python3's importable torch. A Torch_DIR that leads to none is an error, not passed over.

set(SPILLWAY_LIBTORCH_FOUND OFF)
set(_candidates)
if(Torch_DIR)
  get_filename_component(_root "${Torch_DIR}/../../.." ABSOLUTE)
  list(APPEND _candidates "${_root}")
elseif(NOT "$ENV{Torch_DIR}" STREQUAL "")
  get_filename_component(_root "$ENV{Torch_DIR}/../../.." ABSOLUTE)
  list(APPEND _candidates "${_root}")
endif()
set(_prefixes ${CMAKE_PREFIX_PATH})
if(DEFINED ENV{CMAKE_PREFIX_PATH})
  string(REPLACE ":" ";" _environment "$ENV{CMAKE_PREFIX_PATH}")
  list(APPEND _prefixes ${_environment})
endif()
foreach(_prefix IN LISTS _prefixes)
  get_filename_component(_up "${_prefix}/../.." ABSOLUTE)
  list(APPEND _candidates "${_prefix}" "${_up}")
endforeach()
file(GLOB _venv "${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
list(APPEND _candidates ${_venv})

macro(_spillway_try_libtorch _root)
  if(NOT SPILLWAY_LIBTORCH_FOUND AND EXISTS "${_root}/include/torch/csrc/api/include/torch/torch.h"
     AND EXISTS "${_root}/lib/libtorch_cpu.so")
    set(SPILLWAY_LIBTORCH_FOUND ON)
    set(SPILLWAY_LIBTORCH_ROOT "${_root}")
  endif()
endmacro()

set(SPILLWAY_LIBTORCH_REFUSED "")
foreach(_root IN LISTS _candidates)
  _spillway_try_libtorch("${_root}")
  if(NOT SPILLWAY_LIBTORCH_FOUND AND (Torch_DIR OR NOT "$ENV{Torch_DIR}" STREQUAL ""))  # the first candidate
    set(SPILLWAY_LIBTORCH_REFUSED
        "Torch_DIR leads to no LibTorch: expected .../torch/share/cmake/Torch of a folder with include/ and lib/libtorch_cpu.so, looked in ${_root}")
    return()
  endif()
endforeach()
if(NOT SPILLWAY_LIBTORCH_FOUND)
  find_program(_python NAMES python3)
  if(_python)
    execute_process(COMMAND ${_python} -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
                    OUTPUT_VARIABLE _root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    _spillway_try_libtorch("${_root}")
  endif()
endif()

# Both sides must mean the same by std::string, or linking ends in undefined symbols that name no cause.
set(SPILLWAY_LIBTORCH_NEW_STRINGS OFF)
if(SPILLWAY_LIBTORCH_FOUND)
  file(STRINGS "${SPILLWAY_LIBTORCH_ROOT}/lib/libc10.so" _new_strings REGEX "__cxx11" LIMIT_COUNT 1)
  if(_new_strings)
    set(SPILLWAY_LIBTORCH_NEW_STRINGS ON)
  endif()
  if("${CMAKE_CXX_FLAGS}" MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
    if(_new_strings)
      set(SPILLWAY_LIBTORCH_REFUSED "has the new C++ string ABI: take -D_GLIBCXX_USE_CXX11_ABI=0 out of CMAKE_CXX_FLAGS")
    endif()
  elseif(NOT _new_strings)
    set(SPILLWAY_LIBTORCH_REFUSED
        "has the old C++ string ABI: take one with the new, or add -D_GLIBCXX_USE_CXX11_ABI=0 to CMAKE_CXX_FLAGS")
  endif()
  if(SPILLWAY_LIBTORCH_REFUSED)
    set(SPILLWAY_LIBTORCH_FOUND OFF)
    set(SPILLWAY_LIBTORCH_REFUSED "the LibTorch in ${SPILLWAY_LIBTORCH_ROOT} ${SPILLWAY_LIBTORCH_REFUSED}")
  endif()
endif()
if(SPILLWAY_LIBTORCH_FOUND)
  set(SPILLWAY_LIBTORCH_VERSION "")
  foreach(_header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT SPILLWAY_LIBTORCH_VERSION AND EXISTS "${SPILLWAY_LIBTORCH_ROOT}/include/${_header}")
      set(_numbers)
      foreach(_part MAJOR MINOR PATCH)
        file(STRINGS "${SPILLWAY_LIBTORCH_ROOT}/include/${_header}" _line REGEX "define TORCH_VERSION_${_part} [0-9]+")
        string(REGEX MATCH "[0-9]+$" _number "${_line}")
        list(APPEND _numbers "${_number}")
      endforeach()
      string(REPLACE ";" "." SPILLWAY_LIBTORCH_VERSION "${_numbers}")
      if(NOT SPILLWAY_LIBTORCH_VERSION MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$")
        set(SPILLWAY_LIBTORCH_VERSION "")
      endif()
    endif()
  endforeach()
  set(SPILLWAY_LIBTORCH_HAS_CUDA OFF)
  if(EXISTS "${SPILLWAY_LIBTORCH_ROOT}/lib/libtorch_cuda.so")
    set(SPILLWAY_LIBTORCH_HAS_CUDA ON)
  endif()
endif()
if(SPILLWAY_LIBTORCH_FOUND AND NOT TARGET spillway_libtorch)
  # The CUDA runtime of LibTorch's wheel stands in a folder beside it: programs that also link the toolkit's find the
  # wheel's first, so that one of the two, and the one LibTorch was tested with, ends up in the process.
  set(_cuda_paths)
  if(SPILLWAY_WITH_CUDA AND SPILLWAY_LIBTORCH_HAS_CUDA)
    file(GLOB _cudart "${SPILLWAY_LIBTORCH_ROOT}/../nvidia/*/lib/libcudart.so*")
    foreach(_file IN LISTS _cudart)
      get_filename_component(_folder "${_file}" DIRECTORY)
      get_filename_component(_folder "${_folder}" ABSOLUTE)
      list(APPEND _cuda_paths "LINKER:-rpath,${_folder}")
    endforeach()
    list(REMOVE_DUPLICATES _cuda_paths)
  endif()
  add_library(spillway_libtorch INTERFACE)
  target_include_directories(spillway_libtorch SYSTEM INTERFACE
    "${SPILLWAY_LIBTORCH_ROOT}/include" "${SPILLWAY_LIBTORCH_ROOT}/include/torch/csrc/api/include")
  # DT_RPATH instead of DT_RUNPATH: it is searched for LibTorch's own dependencies too, and before the system's
  # folders, so that one copy of the OpenMP runtime (LibTorch's) ends up in the process. A program that is to find
  # LibTorch elsewhere switches it off and sets a run path of its own.
  option(SPILLWAY_LIBTORCH_RPATH "Programs look for LibTorch's libraries in the folder they were linked with" ON)
  if(SPILLWAY_LIBTORCH_RPATH)
    target_link_options(spillway_libtorch INTERFACE
      "LINKER:--disable-new-dtags" "LINKER:-rpath,${SPILLWAY_LIBTORCH_ROOT}/lib" ${_cuda_paths})
  endif()
  target_link_libraries(spillway_libtorch INTERFACE "${SPILLWAY_LIBTORCH_ROOT}/lib/libtorch_cpu.so"
                                                    "${SPILLWAY_LIBTORCH_ROOT}/lib/libc10.so")
  if(SPILLWAY_WITH_CUDA AND SPILLWAY_LIBTORCH_HAS_CUDA)
    # No symbol of libtorch_cuda is named: it is linked for the operators that it registers when it is loaded.
    target_link_libraries(spillway_libtorch INTERFACE
      -Wl,--push-state,--no-as-needed "${SPILLWAY_LIBTORCH_ROOT}/lib/libtorch_cuda.so" -Wl,--pop-state
      "${SPILLWAY_LIBTORCH_ROOT}/lib/libc10_cuda.so")
  endif()
endif()
