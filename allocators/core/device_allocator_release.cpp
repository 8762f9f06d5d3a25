// Cached memory that goes back to its source: what may go, and how.
//
// Note [Giving back]
//
// `empty_cache()` and every other rule that gives cached segments back unmaps the handles that lie
// wholly in free blocks. `cudaFree` waits for the device, but `cuMemUnmap`, and freeing the
// system's memory, wait for nothing: all streams with memory are waited for before. Handles of a
// stream that is captured stay, and while a pool is open no segment is given back.
#include <algorithm>

#include "core/device_allocator.hpp"

namespace umem {

void DeviceAllocator::empty_cache() {
  const BothLocks locks(locks_);
  if (!active_pools_.empty()) return;  // freeing a segment would break a capture
  synchronize_events();
  gather_free_memory();
  release_spares(segments_.spares());
}

// Takes the memory out of the books before any call, so that nobody uses it meanwhile.
void DeviceAllocator::release_spares(std::vector<Spare> spares) {
  LeavingMemory leaving;
  leaving.work = record_work(spares);
  for (const Spare& spare : spares) {
    if (spare.block->segment->is_expandable)
      take_out_mapped(spare, leaving);
    else
      take_out_segment(spare.block, leaving);
  }
  std::erase_if(pools_, [](const auto& entry) {
    return entry.second->users == 0 && entry.second->segments == 0;
  });
  locks_.unlocked([&] { give_back(leaving); });
}

void DeviceAllocator::add_own_stream(StreamId stream) {
  const std::lock_guard lock(locks_.books);
  uses_.add_own(stream);
}

// Returns an event behind what may use the memory, to be waited for, and leaves out what cannot be
// waited for. With the lock: nobody may take the memory from the cache behind the event that is
// recorded here, and what cannot be waited for stays there.
EventId DeviceAllocator::record_work(std::vector<Spare>& spares) {
  const auto needs_event = [&](const Spare& spare) {
    const Segment& segment = *spare.block->segment;
    return segment.is_expandable ||
           segment.heap->kind == MemoryKind::system;
  };
  const auto owner = [](const Spare& spare) { return spare.block->segment->heap->stream; };
  std::erase_if(spares, [&](const Spare& spare) {
    return needs_event(spare) && driver_.capturing(owner(spare));
  });
  std::set<StreamId> owners;
  for (const Spare& spare : spares)
    if (needs_event(spare)) owners.insert(owner(spare));
  if (owners.empty()) return 0;
  const EventId event = uses_.record(owners);
  if (event == 0) std::erase_if(spares, needs_event);
  return event;
}

// Takes whole handles out of a cached block; from an end of its run, if it is there.
void DeviceAllocator::take_out_mapped(const Spare& spare, LeavingMemory& leaving) {
  Block* block = spare.block;
  Heap& heap = *block->segment->heap;
  Range gone = heap.expandable->whole_handles({block->address, block->bytes});
  if (block->previous != nullptr || block->next == nullptr)
    gone.address += gone.bytes - spare.bytes;
  gone.bytes = spare.bytes;
  segments_.take_out(block, gone);
  if (paused_ != nullptr) return;  // its memory went back before
  leaving.mapped.push_back({&heap, gone});
  count_memory(heap, gone.bytes, gone.bytes, false);
}

// A segment that is one cached block.
void DeviceAllocator::take_out_segment(Block* block, LeavingMemory& leaving) {
  const Segment& segment = *block->segment;
  Heap& heap = *segment.heap;
  segments_.uncache(block);
  append_piece(segment, leaving);
  count_memory(heap, segment.bytes, segment.raw_bytes, false);
  if (heap.kind == MemoryKind::pinned) count_page_tables();
  system_bytes_ -= segment.device_bytes;
  if (heap.pool != nullptr) {
    --heap.pool->segments;
    heap.pool->reserved_bytes -= segment.bytes;
  }
  segments_.remove(block);
}

// Device memory is never moved and need not be announced; pinned memory may have taken the place of
// managed memory, for which hints are queued.
void DeviceAllocator::append_piece(const Segment& segment, LeavingMemory& leaving) const {
  const MemoryKind kind = segment.heap->kind;
  leaving.pieces.push_back({kind, segment.raw, segment.raw_bytes});
  if (kind != MemoryKind::device) leaving.announced.push_back({segment.address, segment.bytes});
}

// Announces all segments at once, so that the listener waits only for the longest call.
void DeviceAllocator::give_back(const LeavingMemory& leaving) {
  if (leaving.work != 0) driver_.wait(leaving.work);
  if (release_listener_ != nullptr && !leaving.announced.empty())
    release_listener_->before_release(leaving.announced);
  for (const Run& run : leaving.mapped) mapped_.unmap(run);
  for (const auto& [kind, raw, raw_bytes] : leaving.pieces) {
    source_.deallocate(kind, device_, raw, raw_bytes);
    budget_.give_back(kind, raw_bytes);
  }
}

}  // namespace umem
