// The guard's extension module, one for each minor version of torch.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "guard.hpp"

namespace {

// Whether torch calls the guard. The loader refuses a guard that torch does not call.
PyObject* probe(PyObject*, PyObject*) { Py_RETURN_TRUE; }

PyMethodDef functions[] = {
    {"probe", probe, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, UMEM_GUARD_NAME, nullptr, -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC UMEM_GUARD_INIT() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  auto bound = pybind11::reinterpret_borrow<pybind11::module_>(module);
  umem::bind_guard(bound);
  return module;
}
