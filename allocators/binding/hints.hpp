// The Python side of the hint engine.
#pragma once

#include <nanobind/nanobind.h>

namespace umem {

void bind_hints(nanobind::module_& module);

}  // namespace umem
