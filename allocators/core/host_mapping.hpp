// Anonymous host memory, mapped on boundaries of 2 MiB.
#pragma once

#include "core/types.hpp"

namespace umem {

// Rounded up to pages of the host: 4 KiB on x86, 64 KiB on GH200.
std::size_t mapped_bytes(std::size_t bytes);

// Zeroed when it is first touched. {} where the host refuses.
Range map_host(std::size_t bytes) noexcept;
// `bytes` as mapped, or as asked for.
void unmap_host(Range range) noexcept;

}  // namespace umem
