// The core's VirtualMemory over CUDA's driver.
#pragma once

#include <mutex>
#include <vector>

#include "core/driver.hpp"
#include "cuda/cuda_calls.hpp"

namespace umem {

class CudaVirtualMemory final : public VirtualMemory {
 public:
  explicit CudaVirtualMemory(int devices);  // throws std::runtime_error where a call is missing

  std::size_t granularity(int device) noexcept override;
  std::uintptr_t reserve(int device, std::size_t bytes, std::size_t alignment) noexcept override;
  void unreserve(Range range) noexcept override;
  HandleId create(int device, std::size_t bytes) noexcept override;
  void release(HandleId handle) noexcept override;
  bool map(int device, std::span<const Range> ranges, std::size_t handle_bytes,
           std::span<const HandleId> handles) noexcept override;
  void unmap(Range range, std::size_t handle_bytes) noexcept override;
  bool add_peer(int device, int peer, std::span<const Range> mapped) noexcept override;

 private:
  bool give_access(int device, std::span<const Range> ranges) noexcept;

  struct Device {
    CUmemAllocationProp properties{};
    std::size_t granularity = 0;          // 0: not supported
    std::vector<CUmemAccessDesc> access;  // of the device itself, and of its peers
  };

  const CudaCalls cuda_;
  std::mutex mutex_;  // guards `access`
  std::vector<Device> devices_;
};

}  // namespace umem
