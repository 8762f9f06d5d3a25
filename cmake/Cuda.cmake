# umem_cuda: RMM and CUDA's runtime as one interface target. Sets UMEM_HAS_CUDA.
#
# rmm's own CMake package asks for a CUDA toolkit and links a static runtime, so the target is made
# directly from the wheels, or from a conda environment. The runtime is shared, as torch's is: one
# process, one runtime.
set(UMEM_RMM_MINOR 26.10)  # as in pyproject.toml
set(UMEM_HAS_CUDA FALSE)
if(UMEM_CUDA STREQUAL "none")
  message(STATUS "umem: core only (UMEM_CUDA=none)")
  return()
elseif(NOT UMEM_CUDA MATCHES "^(auto|12|13)$")
  message(FATAL_ERROR "UMEM_CUDA is '${UMEM_CUDA}'; it may be auto, 12, 13 or none.")
endif()

# Under `auto` a missing piece leaves the core; asked for by number, it is an error.
macro(umem_without_cuda reason)
  if(UMEM_CUDA STREQUAL "auto")
    message(WARNING "umem: building the core only, without CUDA: ${reason}")
    return()
  else()
    message(FATAL_ERROR "UMEM_CUDA=${UMEM_CUDA}: ${reason}")
  endif()
endmacro()

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/locate_rmm.py" "${UMEM_CUDA}"
  OUTPUT_VARIABLE located COMMAND_ERROR_IS_FATAL ANY)
string(JSON major GET "${located}" major)
if(NOT major)
  umem_without_cuda("${Python_EXECUTABLE} has no librmm. Run `pip install librmm-cu13` (or \
librmm-cu12), or build with isolation, which brings it; in a conda environment, install librmm and \
cuda-cudart-dev.")
endif()
foreach(key rmm_version rmm_include rmm_library logger_library cudart_include cudart_library run_path)
  string(JSON ${key} GET "${located}" ${key})
endforeach()
if(NOT rmm_version MATCHES "^${UMEM_RMM_MINOR}\\.")
  umem_without_cuda("RMM for CUDA ${major} is ${rmm_version}, and umem is written for \
${UMEM_RMM_MINOR}. Run `pip install 'librmm-cu${major}==${UMEM_RMM_MINOR}.*'`.")
endif()
if(NOT rmm_library OR NOT logger_library)
  umem_without_cuda("librmm.so or librapids_logger.so is missing. Run \
`pip install --force-reinstall librmm-cu${major} rapids-logger`.")
endif()

# The wheels' runtime, unless a toolkit is asked for by name or they lack a piece.
if(DEFINED CUDAToolkit_ROOT OR DEFINED ENV{CUDAToolkit_ROOT} OR NOT cudart_library)
  find_package(CUDAToolkit ${major} QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_VERSION_MAJOR EQUAL major)
    set(cudart_include "${CUDAToolkit_INCLUDE_DIRS}")
    set(cudart_library "${CUDA_cudart_LIBRARY}")
  endif()
endif()
if(NOT cudart_library)
  if(major EQUAL 12)
    set(names "nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12")
  else()
    set(names "nvidia-cuda-runtime nvidia-cuda-crt")
  endif()
  umem_without_cuda("no headers of CUDA ${major}'s runtime. Run `pip install ${names}`, or name \
a toolkit with CUDAToolkit_ROOT.")
endif()

foreach(name rmm logger cudart)
  add_library(umem_${name} SHARED IMPORTED)
  set_target_properties(umem_${name} PROPERTIES IMPORTED_LOCATION "${${name}_library}")
endforeach()

set(rmm_includes ${rmm_include})
list(GET rmm_includes 0 cccl_include)
add_library(umem_cuda INTERFACE)
target_include_directories(umem_cuda SYSTEM INTERFACE
  ${rmm_include} "${cccl_include}/rapids" ${cudart_include})
# As rmm's own package defines them: they name CCCL's inline namespaces, part of librmm's ABI.
target_compile_definitions(umem_cuda INTERFACE
  UMEM_HAS_CUDA
  UMEM_RMM_VERSION="${rmm_version}"
  CCCL_DISABLE_PDL
  CUB_DISABLE_NAMESPACE_MAGIC
  CUB_IGNORE_NAMESPACE_MAGIC_ERROR
  THRUST_DISABLE_ABI_NAMESPACE
  THRUST_IGNORE_ABI_NAMESPACE_ERROR)
# librapids_logger is librmm's need: librmm's own search path does not reach it, so it is named here.
target_link_options(umem_cuda INTERFACE "LINKER:--no-as-needed")
target_link_libraries(umem_cuda INTERFACE umem_rmm umem_logger umem_cudart ${CMAKE_DL_LIBS})

# Where pip, or conda, puts RMM and CUDA's runtime.
set(UMEM_INSTALL_RPATH ${run_path})

set(UMEM_HAS_CUDA TRUE)
message(STATUS "umem: RMM ${rmm_version} at ${rmm_library}")
message(STATUS "umem: CUDA ${major} runtime at ${cudart_library}, headers in ${cudart_include}")
