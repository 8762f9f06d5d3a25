// What the core asks of the machine. The CUDA side implements both; tests inject their own.
#pragma once

#include <span>

#include "core/types.hpp"

namespace umem {

// Gives and takes back segments of one kind of memory.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // Returns nullptr when the kind has no room left. The address is aligned to 256 bytes at least.
  virtual void* allocate(MemoryKind kind, int device, std::size_t bytes) = 0;
  virtual void deallocate(MemoryKind kind, int device, void* address,
                          std::size_t bytes) noexcept = 0;
};

// Streams, events, advice. No call throws: a driver that is going away (exit, a forked child) must
// not take the process with it.
class Driver {
 public:
  virtual ~Driver() = default;

  // Marks the end of the work that `stream` holds now. 0 when no event can be had.
  virtual EventId record(int device, StreamId stream) noexcept = 0;
  // True once the work before the event is done; the event is then recycled.
  virtual bool finished(EventId event) noexcept = 0;
  // Waits for the event and recycles it.
  virtual void wait(EventId event) noexcept = 0;
  // True while work on `stream` is being captured into a graph.
  virtual bool capturing(StreamId stream) noexcept = 0;
  // Replaces whatever advice the range had.
  virtual bool advise(int device, Range range, Advice advice) noexcept = 0;
  // Gives fresh managed pages a home on the device, so that first touches do not fault.
  virtual bool populate(int device, Range range) noexcept = 0;
  virtual MemoryInfo memory(int device) noexcept = 0;
};

// Told of memory that is about to go back to its source.
class ReleaseListener {
 public:
  virtual ~ReleaseListener() = default;

  // Returns when nobody else works on any of the ranges any more. Called under the device's lock: it
  // must wait for nobody who may allocate. In a forked child it does nothing.
  virtual void before_release(std::span<const Range> ranges) noexcept = 0;
};

}  // namespace umem
