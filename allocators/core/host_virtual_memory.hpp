// Virtual memory management over host memory, for tests without a GPU.
#pragma once

#include <map>
#include <mutex>

#include "core/driver.hpp"

namespace umem {

// Reserved addresses cannot be accessed, mapped ones can. The contents of a handle are lost when it
// is unmapped: callers must not rely on them.
class HostVirtualMemory final : public VirtualMemory {
 public:
  // `total_bytes` bounds the handles of all devices together; 0 for no bound.
  explicit HostVirtualMemory(std::size_t total_bytes) : total_bytes_(total_bytes) {}

  std::size_t granularity(int) noexcept override { return kPageBytes; }
  std::uintptr_t reserve(int device, std::size_t bytes, std::size_t alignment) noexcept override;
  void unreserve(Range range) noexcept override;
  HandleId create(int device, std::size_t bytes) noexcept override;
  void release(HandleId handle) noexcept override;
  bool map(int device, Range range, std::size_t handle_bytes,
           std::span<const HandleId> handles) noexcept override;
  void unmap(Range range, std::size_t handle_bytes) noexcept override;
  bool add_peer(int, int, std::span<const Range>) noexcept override { return true; }

 private:
  const std::size_t total_bytes_;
  std::mutex mutex_;
  std::map<HandleId, std::size_t> handles_;  // their bytes
  std::size_t held_bytes_ = 0;
  HandleId last_handle_ = 0;
};

}  // namespace umem
