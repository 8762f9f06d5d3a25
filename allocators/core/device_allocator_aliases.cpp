// Large requests that no hole fits: free memory lies side by side at other addresses meanwhile.
#include <algorithm>

#include "core/device_allocator.hpp"

namespace umem {
namespace {

// An alias is one block: what it has beyond the request is lost meanwhile.
constexpr std::size_t kRequestPerLoss = 8;

}  // namespace

// A free alias of the size that a request would get.
Block* DeviceAllocator::free_alias(const Heap& heap, std::size_t bytes) const {
  for (Block* block : heap.free_aliases)
    if (block->bytes >= bytes && block->bytes - bytes < heap.expandable->handle_bytes())
      return block;
  return nullptr;
}

// Free memory of the heap that has handles of its own.
std::vector<Spare> DeviceAllocator::mapped_spares(const Heap& heap) const {
  std::vector<Spare> all = segments_.spares();
  std::erase_if(all, [&](const Spare& spare) {
    return spare.block->segment->heap != &heap || !spare.block->segment->is_expandable;
  });
  return all;
}

// A block of free memory of the heap, wherever that lies. It was used on the heap's stream, and so
// is the block: nothing has to be waited for. nullptr where that memory does not suffice, where
// memory can move to `growth`, which the heap has found, in less time, or where the driver refuses.
Block* DeviceAllocator::alias(Heap& heap, std::size_t bytes, const Range& growth) {
  ExpandableSegment& expandable = *heap.expandable;
  const std::size_t whole_bytes = round_up(bytes, expandable.handle_bytes());
  if (whole_bytes - bytes > bytes / kRequestPerLoss) return nullptr;
  std::vector<Spare> all = mapped_spares(heap);
  std::vector<Range> free;
  for (const Spare& spare : all)
    free.push_back(expandable.whole_handles({spare.block->address, spare.block->bytes}));
  forget_finished_uses(heap);
  const auto is_busy = [&](std::uintptr_t address) { return heap.last_uses.at(address) != 0; };
  const std::optional<AliasPlan> plan =
      expandable.plan_alias(whole_bytes / expandable.handle_bytes(), free, is_busy);
  const std::size_t cost_of_growth =
      kWaitCost + (kMapCost + kUnmapCost) * growth.bytes / expandable.handle_bytes();
  if (!plan || driver_.capturing(heap.stream)) return nullptr;
  if (plan->cost > cost_of_growth && budget_.excess_bytes(growth.bytes) <= movable_bytes(growth))
    return nullptr;
  const EventId event =
      plan->unmaps ? std::exchange(heap.last_uses.at(expandable.alias_range(*plan).address), 0) : 0;

  // From the last one on: what lies before it in a block stays that block.
  const std::vector<Range> sources = expandable.sources_of(*plan, free);
  for (auto source = sources.rbegin(); source != sources.rend(); ++source) {
    while (all.back().block->address > source->address) all.pop_back();
    const bool is_whole = all.back().block->address == source->address;
    segments_.take_out(all.back().block, *source);
    if (is_whole) all.pop_back();
  }
  const bool is_mapped = locks_.unlocked([&] {
    if (event != 0) driver_.wait(event);
    return expandable.map_alias(*plan);
  });
  if (!is_mapped) {
    for (const Range& source : sources) segments_.add_mapped(heap, source);
    return nullptr;
  }
  Block* block = segments_.add_run(heap, expandable.alias_range(*plan));
  block->segment->is_alias = true;
  return block;
}

// Ends a free one: its memory is free where it was before.
void DeviceAllocator::end_alias(Block* block) {
  Heap& heap = *block->segment->heap;
  std::erase(heap.free_aliases, block);
  const Range alias{block->address, block->bytes};
  segments_.remove_mapped(block, alias);
  for (const Range& range : heap.expandable->end_alias(alias)) segments_.add_mapped(heap, range);
  // What will be mapped there in another one's place waits for this moment, not for a later one.
  EventId& last_use = heap.last_uses[alias.address];
  if (last_use != 0) earlier_uses_.push_back(last_use);
  last_use = uses_.record({heap.stream});
  if (last_use == 0) heap.expandable->keep_alias(alias);
}

void DeviceAllocator::forget_finished_uses(Heap& heap) {
  for (auto& [address, event] : heap.last_uses)
    if (event != 0 && driver_.finished(event)) event = 0;
  std::erase_if(earlier_uses_, [this](EventId event) { return driver_.finished(event); });
}

void DeviceAllocator::end_all_aliases() {
  for (auto& [stream, heaps] : heaps_)
    for (std::unique_ptr<Heap>& heap : heaps) {
      if (heap == nullptr) continue;
      while (!heap->free_aliases.empty()) end_alias(heap->free_aliases.back());
      forget_finished_uses(*heap);
    }
}

}  // namespace umem
