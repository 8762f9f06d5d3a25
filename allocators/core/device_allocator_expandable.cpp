// Plain device memory that grows by mapped handles: where they are mapped, and when they are not.
#include <algorithm>
#include <bit>

#include "core/device_allocator.hpp"

namespace umem {
// Maps `growth` as cached memory; handles that were given back for it are used first.
bool DeviceAllocator::expand(Heap& heap, const Range& growth, Shortage& shortage) {
  if (!reserve(heap, growth.bytes, shortage)) {
    mapped_.release_moving();
    return false;
  }
  if (!mapped_.map(heap, growth)) {
    shortage.limit = Limit::source;
    return false;
  }
  heap.grow_patient();
  count_mapped(heap, growth.bytes);
  segments_.add_mapped(heap, growth);
  return true;
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
  count_unmapped(heap, gone.bytes);
}

void DeviceAllocator::count_mapped(const Heap& heap, std::size_t bytes) {
  ++stats_.num_device_alloc;
  stats_.reserved_bytes.increase(heap.tier, bytes);
  stats_.budget_bytes.increase(bytes);
  kind_stats_[static_cast<std::size_t>(MemoryKind::device)].reserved_bytes += bytes;
}

void DeviceAllocator::count_unmapped(const Heap& heap, std::size_t bytes) {
  ++stats_.num_device_free;
  stats_.reserved_bytes.decrease(heap.tier, bytes);
  stats_.budget_bytes.decrease(bytes);
  kind_stats_[static_cast<std::size_t>(MemoryKind::device)].reserved_bytes -= bytes;
}

bool DeviceAllocator::add_peer(int peer) {
  const BothLocks locks(locks_);
  if (mapped_.virtual_memory() == nullptr) return true;
  std::vector<Range> mapped;
  for (const auto& [stream, heaps] : heaps_)
    for (const std::unique_ptr<Heap>& heap : heaps)
      if (heap != nullptr && heap->expandable != nullptr) heap->expandable->append_mapped(mapped);
  return locks_.unlocked([&] { return mapped_.virtual_memory()->add_peer(device_, peer, mapped); });
}

void DeviceAllocator::stop_mapping() {
  const BothLocks locks(locks_);
  mapped_.stop();
  gather_free_memory();
  if (active_pools_.empty()) release_spares(segments_.spares());
}

}  // namespace umem
