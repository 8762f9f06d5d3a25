# umem_sanitizer: the flags of UMEM_SANITIZE, for the core and its tests alike.
add_library(umem_sanitizer INTERFACE)

if(UMEM_SANITIZE STREQUAL "address")
  set(sanitizers address,undefined)
elseif(UMEM_SANITIZE STREQUAL "thread")
  set(sanitizers thread)
elseif(UMEM_SANITIZE)
  message(FATAL_ERROR "UMEM_SANITIZE is '${UMEM_SANITIZE}'; it may be empty, address or thread.")
endif()

# What starts a test: the emulator, where one is needed.
set(UMEM_TEST_LAUNCHER ${CMAKE_CROSSCOMPILING_EMULATOR})
if(UMEM_SANITIZE)
  # -g1: functions and lines, which reports name; descriptions of variables take long to compile.
  target_compile_options(umem_sanitizer INTERFACE
    -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
  target_link_options(umem_sanitizer INTERFACE -fsanitize=${sanitizers})
endif()

# ThreadSanitizer's shadow memory collides with mappings under the kernel's widest address-space
# randomisation (vm.mmap_rnd_bits above 28), so the tests run without it where that is allowed.
if(UMEM_SANITIZE STREQUAL "thread")
  find_program(UMEM_SETARCH setarch)
  if(UMEM_SETARCH)
    execute_process(COMMAND ${UMEM_SETARCH} -R true
                    RESULT_VARIABLE refused OUTPUT_QUIET ERROR_QUIET)
    if(refused EQUAL 0)
      set(UMEM_TEST_LAUNCHER ${UMEM_SETARCH} -R)
    endif()
  endif()
endif()
