// torch's way to the allocator: an out-of-memory becomes torch.OutOfMemoryError.
#pragma once

#include <torch/csrc/python_headers.h>

namespace umem {

// Functions of the extension module: set_allocator and allocate.
extern PyMethodDef allocation_functions[];

}  // namespace umem
