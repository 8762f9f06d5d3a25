// The core over host memory, for tests and the demo without a GPU.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/driver.hpp"
#include "core/host_virtual_memory.hpp"

namespace umem {

// All kinds of memory are host memory. `total_bytes` bounds allocations; 0 for no bound.
class HostSource final : public SegmentSource {
 public:
  explicit HostSource(std::size_t total_bytes) : total_bytes_(total_bytes) {}

  void* allocate(MemoryKind, int, std::size_t bytes) override {
    if (total_bytes_ != 0 && held_bytes_ + bytes > total_bytes_) return nullptr;
    void* address = std::aligned_alloc(kPageBytes, round_up(bytes, kPageBytes));
    if (address != nullptr) held_bytes_ += bytes;
    return address;
  }
  void deallocate(MemoryKind, int, void* address, std::size_t bytes) noexcept override {
    held_bytes_ -= bytes;
    std::free(address);
  }

 private:
  const std::size_t total_bytes_;
  std::atomic<std::size_t> held_bytes_{0};
};

// Streams of the host complete their work at once: an event has completed when it is recorded.
// Without `virtual_memory` plain device memory comes from the source alone.
class HostDriver final : public Driver {
 public:
  explicit HostDriver(std::size_t total_bytes,
                      std::unique_ptr<VirtualMemory> virtual_memory = nullptr)
      : total_bytes_(total_bytes), virtual_memory_(std::move(virtual_memory)) {}

  EventId record(int, StreamId) noexcept override { return 1; }
  EventId record_all(int, std::span<const StreamId>) noexcept override { return 1; }
  bool finished(EventId) noexcept override { return true; }
  void wait(EventId) noexcept override {}
  bool order(int, StreamId, EventId) noexcept override { return true; }
  bool capturing(StreamId) noexcept override { return false; }
  bool advise(int, Range, Advice) noexcept override { return true; }
  bool populate(int, Range) noexcept override { return true; }
  MemoryInfo memory(int) noexcept override { return {total_bytes_, total_bytes_}; }
  bool synchronize(int) noexcept override { return true; }
  bool copy(int, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) noexcept override {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return true;
  }
  void fill(int, StreamId, Range range, unsigned char value) noexcept override {
    std::memset(reinterpret_cast<void*>(range.address), value, range.bytes);
  }
  bool evict(int, Range) noexcept override { return true; }
  VirtualMemory* virtual_memory() noexcept override { return virtual_memory_.get(); }

 private:
  const std::size_t total_bytes_;
  const std::unique_ptr<VirtualMemory> virtual_memory_;
};

}  // namespace umem
