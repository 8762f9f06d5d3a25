# nanobind, from the interpreter that the extension is built for.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_folder OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE failed ERROR_VARIABLE reason)
if(NOT failed EQUAL 0)
  message(FATAL_ERROR "nanobind is not importable by ${Python_EXECUTABLE}; "
                      "`pip install nanobind`, or build with UMEM_PYTHON=OFF.\n${reason}")
endif()
find_package(nanobind CONFIG REQUIRED PATHS "${nanobind_folder}" NO_DEFAULT_PATH)
