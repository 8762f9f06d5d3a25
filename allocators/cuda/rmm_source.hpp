// Segments from RMM's memory resources, and host memory, page-locked or not. RMM's own host memory
// begins on boundaries of 256 bytes, where segments need 2 MiB.
#pragma once

#include <array>
#include <cuda/memory_resource>
#include <optional>

#include "core/driver.hpp"
#include "core/pinned_memory.hpp"

namespace umem {

class RmmSource final : public SegmentSource {
 public:
  using Resource = cuda::mr::any_resource<cuda::mr::device_accessible>;

  RmmSource();

  void* allocate(MemoryKind kind, int device, std::size_t bytes) override;
  void deallocate(MemoryKind kind, int device, void* address, std::size_t bytes) noexcept override;

 private:
  std::array<std::optional<Resource>, kKinds> resources_;  // by MemoryKind; none for the host's
  PinnedMemory pinned_;
};

}  // namespace umem
