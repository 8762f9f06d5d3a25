// Plain device memory that grows by mapped handles.
#pragma once

#include <optional>
#include <vector>

#include "core/budget.hpp"
#include "core/driver.hpp"
#include "core/expandable_segment.hpp"
#include "core/heap.hpp"
#include "core/locks.hpp"
#include "core/segments.hpp"
#include "core/stream_uses.hpp"

namespace umem {

// A free alias of the size that a request would get.
Block* free_alias(const Heap& heap, std::size_t bytes);

// For a thread that holds both locks; calls of the driver are made without that of the books.
class MappedMemory {
 public:
  MappedMemory(int device, Driver& driver, Locks& locks, StreamUses& uses, Segments& segments,
               const Budget& budget)
      : device_(device),
        driver_(driver),
        locks_(locks),
        uses_(uses),
        segments_(segments),
        budget_(budget) {}

  // nullptr where it does not serve this device. Asked for when it is first needed: installing an
  // allocator makes no CUDA context.
  VirtualMemory* virtual_memory();
  void stop() { virtual_memory_ = nullptr; }

  // Where the fewest mapped handles make a cached block of `bytes`: at one side of a hole, beside
  // the free memory there, or in all of it; rather where nothing must be unmapped before. 0 bytes
  // where the heap does not grow by handles, or its addresses have no place.
  Range growth_for(Heap& heap, std::size_t bytes);
  // Maps handles that were given back for it first. False where the driver refuses.
  bool map(Heap& heap, const Range& growth);
  // No work may use a run.
  bool map(const Run& run) { return run.heap->expandable->map(run.range, moving_); }
  void unmap(const Run& run) { run.heap->expandable->unmap(run.range, moving_); }
  // Keeps handles that are unmapped from now on for a heap, or no longer.
  void keep_handles_for(const Heap& heap) {
    moving_.handle_bytes = heap.expandable->handle_bytes();
  }
  void keep_no_handles() { moving_.handle_bytes = 0; }
  // Gives handles back that found no place.
  void release_moving();

  // Free memory of the heap that has handles of its own.
  std::vector<Spare> spares_of(const Heap& heap) const;
  // A block of that, wherever it lies. It was used on the heap's stream, and so is the block:
  // nothing has to be waited for. nullptr where that memory does not suffice, where the driver
  // refuses, or where handles `may_grow` into `growth` and that takes less time.
  Block* alias(Heap& heap, std::size_t bytes, const Range& growth, bool may_grow);
  // Ends a free one: its memory is free where it was before.
  void end_alias(Block* block);
  void forget_finished_uses(Heap& heap);
  // Behind all work before the end of an alias; of a heap that ends.
  void wait_for_uses(const Heap& heap);
  void wait_for_earlier_uses();

 private:
  bool can_expand(Heap& heap);
  std::size_t large_handle_bytes() const;

  const int device_;
  Driver& driver_;
  Locks& locks_;
  StreamUses& uses_;
  Segments& segments_;
  const Budget& budget_;
  std::optional<VirtualMemory*> virtual_memory_;  // none: not asked for yet
  MovingHandles moving_;                          // without handles but while room is made
  std::vector<EventId> earlier_uses_;  // of aliases that have ended again since
};

}  // namespace umem
