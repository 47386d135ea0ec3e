# The target `docs`: the reference of the public headers, made by doxygen where it is installed, in <build>/reference/html.
# docs/Doxyfile says how; a warning is an error.

find_program(SPILLWAY_DOXYGEN doxygen)
mark_as_advanced(SPILLWAY_DOXYGEN)
if(SPILLWAY_DOXYGEN AND PROJECT_IS_TOP_LEVEL)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/Doxyfile @ONLY
       CONTENT "@INCLUDE = @PROJECT_SOURCE_DIR@/docs/Doxyfile\nOUTPUT_DIRECTORY = @PROJECT_BINARY_DIR@/reference\n")
  add_custom_target(docs COMMAND ${SPILLWAY_DOXYGEN} ${PROJECT_BINARY_DIR}/Doxyfile WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                    COMMENT "The reference: ${PROJECT_BINARY_DIR}/reference/html/index.html" VERBATIM)
endif()
