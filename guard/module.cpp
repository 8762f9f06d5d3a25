// The guard's extension module, one for each minor version of torch: umem/runtime/_guard.pyi.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "allocation.hpp"

namespace {

PyObject* probe(PyObject*, PyObject*) { Py_RETURN_TRUE; }

PyMethodDef module_functions[] = {
    {"probe", probe, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, UMEM_GUARD_NAME, nullptr, -1,
                                 module_functions,      nullptr,         nullptr, nullptr,
                                 nullptr};

}  // namespace

// An error of torch leaves as a Python error; the loader says what it means.
PyMODINIT_FUNC UMEM_GUARD_INIT() {
  HANDLE_TH_ERRORS
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr || PyModule_AddFunctions(module, umem::allocation_functions) < 0)
    return nullptr;
  return module;
  END_HANDLE_TH_ERRORS
}
