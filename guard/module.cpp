// The guard's extension module, one for each minor version of torch: umem/runtime/_guard.pyi.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "allocation.hpp"
#include "guard.hpp"

namespace {

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,      UMEM_GUARD_NAME, nullptr, -1,
                                 umem::allocation_functions, nullptr,         nullptr, nullptr,
                                 nullptr};

}  // namespace

// An error of torch leaves as a Python error; the loader says what it means.
PyMODINIT_FUNC UMEM_GUARD_INIT() {
  HANDLE_TH_ERRORS
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  auto bound = pybind11::reinterpret_borrow<pybind11::module_>(module);
  umem::bind_guard(bound);
  return module;
  END_HANDLE_TH_ERRORS
}
