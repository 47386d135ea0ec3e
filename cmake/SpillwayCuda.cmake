# Compiles .cu files with nvcc and adds their objects to a target.
#
# CMake's own CUDA language is not used: CMake 3.25 does not know C++20 for this nvcc, it probes for GPUs, and it decides
# by itself which CUDA runtime a program links. Kernels need none of that: no device linking, one shared runtime.

set(SPILLWAY_CUDA_ARCHITECTURES "80;90;100" CACHE STRING
    "GPUs that real code is made for (compute capabilities without the point); newer ones compile the last one's PTX")

# Rounding as docs/numerics.md has it.
set(SPILLWAY_CUDA_FLAGS -std=c++17 -O3 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false)

function(spillway_cuda_sources target)
  set(code)
  foreach(architecture IN LISTS SPILLWAY_CUDA_ARCHITECTURES)
    list(APPEND code -gencode arch=compute_${architecture},code=sm_${architecture})
    set(newest ${architecture})
  endforeach()
  list(APPEND code -gencode arch=compute_${newest},code=compute_${newest})
  foreach(name IN LISTS ARGN)
    set(source ${CMAKE_CURRENT_SOURCE_DIR}/${name})
    string(REPLACE "/" "_" object ${name})
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${object}.o)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -ccbin ${CMAKE_CXX_COMPILER} ${SPILLWAY_CUDA_FLAGS} ${code} -Xcompiler
              -fPIC,-Wall,-Wextra,-ffp-contract=off -I${PROJECT_SOURCE_DIR} -MD -MT ${object} -MF ${object}.d -c ${source}
              -o ${object}
      DEPENDS ${source}
      DEPFILE ${object}.d
      COMMENT "Compiling ${name} for GPUs ${SPILLWAY_CUDA_ARCHITECTURES}"
      COMMAND_EXPAND_LISTS VERBATIM)
    list(APPEND objects ${object})
    target_sources(${target} PRIVATE ${object})
    set_source_files_properties(${object} TARGET_DIRECTORY ${target} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  endforeach()
  # The target may stand in another folder, which sees no custom command of this one.
  add_custom_target(${target}_cuda DEPENDS ${objects})
  add_dependencies(${target} ${target}_cuda)
endfunction()
