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

// Streams, events, advice. No call throws: a driver that is shutting down (at exit, in a forked
// child) must not end the process.
class Driver {
 public:
  virtual ~Driver() = default;

  // Records an event after the current work of `stream`. 0 on failure.
  virtual EventId record(int device, StreamId stream) noexcept = 0;
  // True once the event has completed; the event is then recycled.
  virtual bool finished(EventId event) noexcept = 0;
  // Waits for the event and recycles it.
  virtual void wait(EventId event) noexcept = 0;
  // True while work on `stream` is being captured into a graph.
  virtual bool capturing(StreamId stream) noexcept = 0;
  // Replaces the advice of the range.
  virtual bool advise(int device, Range range, Advice advice) noexcept = 0;
  // Gives fresh managed pages a home on the device, so that first touches do not fault.
  virtual bool populate(int device, Range range) noexcept = 0;
  virtual MemoryInfo memory(int device) noexcept = 0;
};

// Is notified before memory goes back to its source.
class ReleaseListener {
 public:
  virtual ~ReleaseListener() = default;

  // Returns when no other thread works on the ranges. Called under the device's lock: it must not
  // wait for a thread that may allocate. Does nothing in a forked child.
  virtual void before_release(std::span<const Range> ranges) noexcept = 0;
};

}  // namespace umem
