// Free memory of one stream that serves another one, at the addresses where it lies.
//
// Note [Borrowing]
//
// Where handles move between heaps, the host waits for the work of all streams, and the driver
// takes its time: FSDP2 gathers and reduces on streams of their own, and passed handles on twice
// in each layer. So within a budget that is spent, a free block of another stream's heap serves a
// request where it lies: the requesting stream waits for the work that all streams with memory
// have then (`cudaStreamWaitEvent`), and nothing is mapped. Of those, one may still read what
// another one was given back: FSDP2 frees gradients of its reducing stream while the program's
// stream updates weights by them, and has the former wait only before its next request. Torch's
// own allocator keeps such memory to its stream but for `cudaFree`, which waits for the device.
// Streams of umem's own are left out, as they have the updates of a whole step in their queues:
// what they use of the program's memory is freed only once a stream of the program waits for them.
// What is theirs serves others last.
//
// A borrowed block that is free serves the borrower's next request of exactly its size. When its
// owner, or any request, finds nothing else, it is its owner's again, in the same order.
#include "core/device_allocator.hpp"

namespace umem {

// A free borrowed block of the size that a request would get.
Block* DeviceAllocator::free_borrowed(const Heap& heap, std::size_t bytes) const {
  for (Block* block : heap.free_borrowed)
    if (block->bytes == bytes) return block;
  return nullptr;
}

// A cached block of another stream's heap, for work behind all that may still use it.
// nullptr where none is large enough, or where the streams cannot be put in order.
Block* DeviceAllocator::borrow(Heap& heap, std::size_t bytes, Streams from) {
  if (heap.tier == Tier::small || heap.expandable == nullptr) return nullptr;
  Block* best = nullptr;
  for (const auto& [stream, heaps] : heaps_)
    for (const std::unique_ptr<Heap>& other : heaps) {
      if (!uses_.are(from, stream)) break;
      if (other == nullptr || other.get() == &heap || other->expandable == nullptr ||
          other->tier != heap.tier)
        continue;
      Block* const block = other->index.best_fit(bytes);
      if (block != nullptr && (best == nullptr || block->bytes < best->bytes)) best = block;
    }
  if (best == nullptr || !uses_.put_behind(heap.stream, best->segment->heap->stream))
    return nullptr;
  segments_.uncache(best);
  segments_.cut(best, bytes);
  best->borrower = &heap;
  return best;
}

// Free borrowed blocks of `owner`, or of all heaps, are their owners' again, whose streams use them
// behind what may still use them. Where streams cannot be put in order, blocks stay borrowed.
void DeviceAllocator::take_back(const Heap* owner, Streams from) {
  for (auto& [stream, heaps] : heaps_)
    for (const std::unique_ptr<Heap>& heap : heaps) {
      if (heap == nullptr) continue;
      if (!uses_.are(from, stream)) break;
      std::map<const Heap*, bool> is_behind;
      std::erase_if(heap->free_borrowed, [&](Block* block) {
        const Heap* const its_owner = block->segment->heap;
        if (owner != nullptr && its_owner != owner) return false;
        const auto [entry, is_new] = is_behind.try_emplace(its_owner, false);
        if (is_new) entry->second = uses_.put_behind(its_owner->stream, heap->stream);
        if (!entry->second) return false;
        block->borrower = nullptr;
        settle(block);
        return true;
      });
    }
}

void DeviceAllocator::end_all_aliases() {
  for (auto& [stream, heaps] : heaps_)
    for (std::unique_ptr<Heap>& heap : heaps) {
      if (heap == nullptr) continue;
      while (!heap->free_aliases.empty()) mapped_.end_alias(heap->free_aliases.back());
      mapped_.forget_finished_uses(*heap);
    }
}

// All free memory is where it belongs, and can be given back.
void DeviceAllocator::gather_free_memory() {
  end_all_aliases();
  take_back(nullptr, Streams::all);
}

}  // namespace umem
