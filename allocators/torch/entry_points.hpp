// The functions that torch's pluggable allocator calls, over the process's one allocator.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "core/allocator.hpp"

namespace umem {

// Makes the allocator that the entry points serve. It is never destroyed: tensors may outlive
// every static object, and CUDA may be gone by then. Throws std::logic_error when there is one.
Allocator& install(const Config& config);

// nullptr before install.
Allocator* installed() noexcept;

// Addresses, by the names of torch_entry_points() in umem/runtime/_native.pyi.
std::map<std::string, std::uintptr_t> entry_points();

}  // namespace umem
