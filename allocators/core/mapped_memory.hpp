// Plain device memory that grows by mapped handles.
//
// Note [Expandable segments]
//
// Each heap of plain device memory, that is each stream and size range, reserves addresses, some
// times as many as the card has bytes, and maps physical memory into them (`cuMemCreate`,
// `cuMemMap`, `cuMemUnmap`). Free blocks merge across the whole range. A run of mapped handles is
// a segment in statistics and in `torch.cuda.memory_snapshot()`, with `is_expandable`.
//
// Handles are of 2 MiB for blocks below 2 MiB, else of 8 MiB, or of 4 or 2 MiB where a budget
// below 1.5 or 0.75 GiB is set when a stream's first large block is made. A hole between two
// tensors keeps less than two handles; all others in it can go elsewhere. Smaller handles keep
// less and take more calls. Mapping takes so little time that handles move for next to nothing
// where there is little to spare.
//
// If no free block is large enough, handles are mapped where the fewest are missing: at one side
// of a hole, beside the free memory there, in all of the hole, or at the end of the range.
//
// Mapped memory is accessible to the GPUs it is mapped for: its own, and every GPU that this
// process allocates on, from that GPU's first allocation. Torch enables access when it first
// copies between two GPUs, of which a pluggable allocator is not told. GPUs that belong to other
// processes of a node are not mapped for, since each would cost time at each growth.
//
// Note [Aliases]
//
// Within a budget that is spent, free memory lies in holes between tensors, and a large tensor,
// such as the logits, needs one range. Handles of free blocks of the same heap are then mapped a
// second time, side by side at addresses of their own (CUDA's virtual aliasing;
// expandable_segment_aliases.cpp). A handle is used at one of its addresses at a time, and stays
// mapped at the others. The memory was used on the heap's stream, and is used on it again: no call
// of the driver and no wait is needed where the same handles meet again in the next step. Once the
// tensor is free, the alias serves the next request of its size; when smaller requests find
// nothing else, its handles are free in their old places. Where others must be mapped at its
// addresses, the work before its end is waited for, or new addresses are taken: the first ones of
// this kind where nothing is mapped any more. Handles move to a hole, by unmapping and mapping
// behind a wait, where that takes fewer calls, and where enough of them lie elsewhere than beside
// that hole.
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

  // Where the fewest mapped handles make a cached block of `bytes`, rather where nothing must be
  // unmapped before. 0 bytes where the heap does not grow by handles, or its addresses have no
  // place.
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
  // A block of that, wherever it lies. nullptr where that memory does not suffice, where the driver
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
