// The guard on tensors, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace umem {

void bind_guard(pybind11::module_& module);

}  // namespace umem
