// The core's Driver over CUDA's runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "core/driver.hpp"
#include "cuda/cuda_virtual_memory.hpp"

namespace umem {

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(int devices) : devices_(static_cast<std::size_t>(devices)) {}

  EventId record(int device, StreamId stream) noexcept override;
  EventId record_all(int device, std::span<const StreamId> streams) noexcept override;
  bool finished(EventId event) noexcept override;
  void wait(EventId event) noexcept override;
  bool order(int device, StreamId stream, EventId event) noexcept override;
  bool capturing(StreamId stream) noexcept override;
  bool advise(int device, Range range, Advice advice) noexcept override;
  bool populate(int device, Range range) noexcept override;
  MemoryInfo memory(int device) noexcept override;
  bool synchronize(int device) noexcept override;
  bool copy(int device, std::uintptr_t to, std::uintptr_t from,
            std::size_t bytes) noexcept override;
  void fill(int device, StreamId stream, Range range, unsigned char value) noexcept override;
  bool evict(int device, Range range) noexcept override;
  VirtualMemory* virtual_memory() noexcept override;

 private:
  struct Event {
    cudaEvent_t handle;
    int device;
  };
  struct Device {
    std::vector<Event*> idle_events;
    cudaStream_t stream = nullptr;   // see separate_stream()
    cudaStream_t meeting = nullptr;  // of record_all(): it has no work but to wait for others
  };

  EventId record_on(int device, StreamId stream) noexcept;
  void recycle(Event* event) noexcept;
  cudaStream_t separate_stream(int device) noexcept;  // nullptr on failure
  cudaStream_t made_once(int device, cudaStream_t Device::* stream) noexcept;  // the same

  std::mutex mutex_;
  std::vector<Device> devices_;
  std::once_flag asked_;
  std::unique_ptr<CudaVirtualMemory> virtual_memory_;
};

}  // namespace umem
