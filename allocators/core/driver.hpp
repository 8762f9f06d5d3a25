// The interfaces of the core to the machine. The CUDA side implements them; tests inject fakes.
#pragma once

#include <span>

#include "core/types.hpp"

namespace umem {

// Allocates and frees segments of one kind of memory.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // Returns nullptr when the kind has no memory left. Addresses are aligned to at least 256 bytes.
  virtual void* allocate(MemoryKind kind, int device, std::size_t bytes) = 0;
  virtual void deallocate(MemoryKind kind, int device, void* address,
                          std::size_t bytes) noexcept = 0;
};

// Physical device memory in handles, and the addresses that they are mapped into. No call throws.
class VirtualMemory {
 public:
  virtual ~VirtualMemory() = default;

  // Sizes of handles are multiples of it; 0 where the device or the driver has no such memory, or
  // where a GPU could not read another one's. Then nothing else is called.
  virtual std::size_t granularity(int device) noexcept = 0;
  // Reserves addresses without memory. 0 on failure.
  virtual std::uintptr_t reserve(int device, std::size_t bytes,
                                 std::size_t alignment) noexcept = 0;
  virtual void unreserve(Range range) noexcept = 0;
  // 0 when the device has no memory left.
  virtual HandleId create(int device, std::size_t bytes) noexcept = 0;
  virtual void release(HandleId handle) noexcept = 0;
  // Maps the first handles, each of `handle_bytes`, side by side into the ranges, for access by the
  // device and its peers (add_peer). On failure nothing is mapped.
  virtual bool map(int device, std::span<const Range> ranges, std::size_t handle_bytes,
                   std::span<const HandleId> handles) noexcept = 0;
  // Unmaps handles of `handle_bytes`, which stay. No work may use the range any more: the call
  // waits for nothing.
  virtual void unmap(Range range, std::size_t handle_bytes) noexcept = 0;
  // Lets another GPU access what is mapped for the device: the given ranges, and later ones. False
  // where that is refused; then later ranges can still be mapped for the others.
  virtual bool add_peer(int device, int peer, std::span<const Range> mapped) noexcept = 0;
};

// Streams, events, advice. No call throws: a driver that is shutting down (at exit, in a forked
// child) must not end the process.
class Driver {
 public:
  virtual ~Driver() = default;

  // Records an event after the current work of `stream`, which may be of another device than this
  // one unless it is the default stream. 0 on failure.
  virtual EventId record(int device, StreamId stream) noexcept = 0;
  // The same for several streams of the device.
  virtual EventId record_all(int device, std::span<const StreamId> streams) noexcept = 0;
  // True once the event has completed; the event is then recycled.
  virtual bool finished(EventId event) noexcept = 0;
  // Waits for the event and recycles it.
  virtual void wait(EventId event) noexcept = 0;
  // Has later work of `stream` wait for the event, and recycles it. False on failure.
  virtual bool order(int device, StreamId stream, EventId event) noexcept = 0;
  // True while work on `stream` is being captured into a graph.
  virtual bool capturing(StreamId stream) noexcept = 0;
  // Replaces the advice of the range.
  virtual bool advise(int device, Range range, Advice advice) noexcept = 0;
  // Gives fresh managed pages a home on the device, so that first touches do not fault.
  virtual bool populate(int device, Range range) noexcept = 0;
  virtual MemoryInfo memory(int device) noexcept = 0;
  // Waits for all work of the device. False where some of it has failed, or cannot be waited for.
  virtual bool synchronize(int device) noexcept = 0;
  // Copies between plain device memory and host memory, and returns when the copy is done.
  virtual bool copy(int device, std::uintptr_t to, std::uintptr_t from,
                    std::size_t bytes) noexcept = 0;
  // Has a stream set all bytes of memory of any kind, unless it is being captured into a graph. A
  // refusal leaves them as they are.
  virtual void fill(int device, StreamId stream, Range range, unsigned char value) noexcept = 0;
  // Moves managed pages to the host, and returns when they are there.
  virtual bool evict(int device, Range range) noexcept = 0;
  // nullptr: plain device memory comes from the source alone.
  virtual VirtualMemory* virtual_memory() noexcept { return nullptr; }
};

// Is notified before memory goes back to its source.
class ReleaseListener {
 public:
  virtual ~ReleaseListener() = default;

  // Returns when no other thread works on the ranges. It must not wait for a thread that may need
  // new memory. Does nothing in a forked child.
  virtual void before_release(std::span<const Range> ranges) noexcept = 0;
};

}  // namespace umem
