# How every Spillway target is compiled.
#
# -ffp-contract=off everywhere: the numerics contract rounds each operation on its own, so a fused multiply-add anywhere
# would change bits between instruction sets (docs/numerics.md).

# A project that takes Spillway in chooses for itself.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(SPILLWAY_CCACHE ccache)
if(SPILLWAY_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # A precompiled header changes its timestamp between build folders: without these two, ccache would never hit.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${SPILLWAY_CCACHE})
endif()

# Unity builds compile several sources at once, which reads what they all include once: a whole build takes less, one
# after a change more. The sanitizers' presets build everything so (CMAKE_UNITY_BUILD), and SPILLWAY_UNITY what includes
# LibTorch. A name of an anonymous namespace is then one of all sources of its target.
option(SPILLWAY_UNITY "Compile the sources that include LibTorch several at a time" OFF)

# spillway_unity(<target>): one that includes LibTorch.
function(spillway_unity target)
  if(SPILLWAY_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
endfunction()

function(spillway_configure_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  get_target_property(kind ${target} TYPE)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                              $<INSTALL_INTERFACE:include>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
  # -fPIC for programs too, where CMake's own switch would say -fPIE: programs share the libraries' precompiled header,
  # and the compiler refuses one that was made with another of the two.
  target_compile_options(${target} PRIVATE -Wall -Wextra -ffp-contract=off -fPIC)
  if(SPILLWAY_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(SPILLWAY_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${SPILLWAY_SANITIZE} -fno-omit-frame-pointer -g1)
    if(SPILLWAY_SANITIZE MATCHES "undefined")
      target_compile_options(${target} PRIVATE -fno-sanitize-recover=undefined)
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${SPILLWAY_SANITIZE})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # The sanitizers' own branches make g++ see uninitialised and stray reads in the standard library's headers.
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow)
    endif()
  endif()
  if((CMAKE_UNITY_BUILD OR SPILLWAY_UNITY) AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ takes a source of a unity build for a header, whose classes should not hold types of an anonymous namespace.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # gcc's precompiled-header flags are accepted as they are; only this warning of LibTorch's headers is noise.
    target_compile_options(${target} PRIVATE -Wno-unused-command-line-argument)
  endif()
endfunction()
