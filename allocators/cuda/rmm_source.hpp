// Segments from RMM's memory resources, and page-locked host memory.
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

  // Kind `system` only where the configuration names it: RMM refuses it on most machines.
  explicit RmmSource(const Config& config);

  void* allocate(MemoryKind kind, int device, std::size_t bytes) override;
  void deallocate(MemoryKind kind, int device, void* address, std::size_t bytes) noexcept override;

 private:
  std::array<std::optional<Resource>, kKinds> resources_;  // by MemoryKind; none for `pinned`
  PinnedMemory pinned_;
};

}  // namespace umem
