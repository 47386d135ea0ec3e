# What `cmake --install` puts where. Two components: `core`, complete without LibTorch, and `spillway` on top of it. No
# file that is installed names a folder of the build machine: LibTorch and the other libraries are found again by whoever
# uses it.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/spillway)

# spillway_install_library(<target> <component> <name> <layer>...): the library, its headers, its exported target.
function(spillway_install_library target component name)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS ${target} EXPORT ${component}Targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component})
  install(EXPORT ${component}Targets NAMESPACE spillway:: DESTINATION ${_package} FILE ${component}-targets.cmake
          COMPONENT ${component})
  foreach(layer IN LISTS ARGN)
    if(EXISTS ${PROJECT_SOURCE_DIR}/include/spillway/${layer})
      install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/spillway/${layer} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/spillway
              COMPONENT ${component} FILES_MATCHING PATTERN "*.h")
    endif()
  endforeach()
endfunction()

# The packages that hold the imported targets which a static library is linked with, by the names of those targets: read
# from the target itself, so that an optional part is asked for exactly where it is linked.
function(spillway_linked_packages target result)
  get_target_property(linked ${target} INTERFACE_LINK_LIBRARIES)
  set(packages)
  foreach(pair "Threads::|Threads" "fmt::fmt>|fmt" "spdlog::|spdlog" "CUDA::|CUDAToolkit" "MPI::|MPI")
    string(REGEX MATCH "^[^|]+" prefix "${pair}")
    string(REGEX MATCH "[^|]+$" package "${pair}")
    string(FIND "${linked}" "${prefix}" found)
    if(NOT found EQUAL -1)
      list(APPEND packages ${package})
    endif()
  endforeach()
  set(${result} ${packages} PARENT_SCOPE)
endfunction()

spillway_install_library(spillway_core core core core device memory lane formats comm state runtime schedule plan)
spillway_linked_packages(spillway_core SPILLWAY_CORE_PACKAGES)
set(SPILLWAY_CORE_VERSIONS)
foreach(pair "fmt=^[0-9]+" "spdlog=^[0-9]+\\.[0-9]+")
  string(REGEX MATCH "^[^=]+" package "${pair}")
  string(REGEX MATCH "[^=]+$" shape "${pair}")
  string(REGEX MATCH "${shape}" version "${${package}_VERSION}")
  if(package IN_LIST SPILLWAY_CORE_PACKAGES AND version)
    list(APPEND SPILLWAY_CORE_VERSIONS ${package}=${version})
  endif()
endforeach()
if(SPILLWAY_WITH_TORCH)
  spillway_install_library(spillway spillway spillway models train)
  install(FILES ${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake DESTINATION ${_package} COMPONENT spillway)
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/spillwayConfig.cmake.in ${PROJECT_BINARY_DIR}/spillwayConfig.cmake
                              INSTALL_DESTINATION ${_package} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/spillwayConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/spillwayConfig.cmake ${PROJECT_BINARY_DIR}/spillwayConfigVersion.cmake
        DESTINATION ${_package} COMPONENT core)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT core)
