// The Python side of copies.
#pragma once

#include <nanobind/nanobind.h>

namespace umem {

// Nothing in a build without CUDA.
void bind_copies(nanobind::module_& module);

}  // namespace umem
