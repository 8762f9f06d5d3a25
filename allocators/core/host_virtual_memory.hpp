// Virtual memory management over host memory, for tests without a GPU.
#pragma once

#include <map>
#include <mutex>

#include "core/driver.hpp"

namespace umem {

// Reserved addresses cannot be accessed, mapped ones can. A handle is a part of a file in memory, so
// that it has the same contents wherever it is mapped.
class HostVirtualMemory final : public VirtualMemory {
 public:
  // `total_bytes` bounds the handles of all devices together; 0 for no bound.
  explicit HostVirtualMemory(std::size_t total_bytes);
  HostVirtualMemory(const HostVirtualMemory&) = delete;
  HostVirtualMemory& operator=(const HostVirtualMemory&) = delete;
  ~HostVirtualMemory() override;

  std::size_t granularity(int) noexcept override { return kPageBytes; }
  std::uintptr_t reserve(int device, std::size_t bytes, std::size_t alignment) noexcept override;
  void unreserve(Range range) noexcept override;
  HandleId create(int device, std::size_t bytes) noexcept override;
  void release(HandleId handle) noexcept override;
  bool map(int device, std::span<const Range> ranges, std::size_t handle_bytes,
           std::span<const HandleId> handles) noexcept override;
  void unmap(Range range, std::size_t handle_bytes) noexcept override;
  bool add_peer(int, int, std::span<const Range>) noexcept override { return true; }

 private:
  const std::size_t total_bytes_;
  const int file_;
  std::mutex mutex_;
  std::map<HandleId, std::size_t> handles_;  // their bytes; a handle is its offset + 1
  std::size_t held_bytes_ = 0;
  std::size_t file_bytes_ = 0;  // grows only: given back, a part takes no memory
};

}  // namespace umem
