#include "allocation.hpp"

#include <c10/util/Exception.h>
#include <sys/types.h>
#include <torch/csrc/Exceptions.h>

#include "core/types.hpp"

namespace umem {
namespace {

// A stream is passed on as it is, so that no header of CUDA is needed.
using AllocateFunction = void*(ssize_t bytes, int device, void* stream);
using FreeFunction = void(void* address, ssize_t bytes, int device, void* stream);

AllocateFunction* allocate_function = nullptr;
FreeFunction* free_function = nullptr;

}  // namespace
}  // namespace umem

// The entry points that torch calls in the place of umem_malloc and umem_free.
extern "C" {

__attribute__((visibility("default"))) void* umem_guard_malloc(ssize_t bytes, int device,
                                                               void* stream) {
  try {
    return umem::allocate_function(bytes, device, stream);
  } catch (const umem::OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

__attribute__((visibility("default"))) void umem_guard_free(void* address, ssize_t bytes,
                                                            int device, void* stream) {
  umem::free_function(address, bytes, device, stream);
}
}

namespace umem {
namespace {

PyObject* set_allocator(PyObject*, PyObject* arguments) {
  unsigned long long allocate = 0, free = 0;
  if (PyArg_ParseTuple(arguments, "KK", &allocate, &free) == 0) return nullptr;
  allocate_function = reinterpret_cast<AllocateFunction*>(allocate);
  free_function = reinterpret_cast<FreeFunction*>(free);
  Py_RETURN_NONE;
}

PyObject* allocate(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  Py_ssize_t bytes = 0;
  if (PyArg_ParseTuple(arguments, "n", &bytes) == 0) return nullptr;
  return PyLong_FromVoidPtr(umem_guard_malloc(bytes, 0, nullptr));
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef allocation_functions[] = {
    {"set_allocator", set_allocator, METH_VARARGS, nullptr},
    {"allocate", allocate, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace umem
