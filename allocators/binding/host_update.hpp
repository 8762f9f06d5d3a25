// The Python side of updates on the host's cores.
#pragma once

#include <nanobind/nanobind.h>

namespace umem {

void bind_host_update(nanobind::module_& module);

}  // namespace umem
