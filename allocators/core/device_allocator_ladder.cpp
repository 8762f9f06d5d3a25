// The ladder of an allocation: what serves a request that the cache has no block for, from what
// costs the least on.
//
// Note [The ladder]
//
// The budget counts mapped handles, all of them and to the byte. A request beyond it first gets
// free memory of its own range, then of another stream's, where that lies (Note [Aliases], Note
// [Borrowing]). Then pending events are waited for, if that frees a block of the heap, enough of
// its memory for an alias, or memory that makes enough room. Then cached segments that no live
// block uses, and free handles of expandable segments, are given back, of all streams, kinds and
// heaps, as few as make room; none if all of them would not. Those of a graph's private pool stay.
// A handle moves by unmapping and mapping, and is not released; handles of the other size are
// released first, so that the card never holds more than the budget. The host comes last, so that
// requests return to the device as soon as it has room.
//
// A card that is full before the budget is spent, or without a budget, is treated in the same way.
//
// Page-locked memory beyond the budget that is free again serves classes that the policy
// page-locks, before new memory is locked. So weights that were loaded beyond the budget, and
// change places with others before the first call, leave their memory to them.
#include "core/device_allocator.hpp"

namespace umem {

// Counts the rung that served.
Block* DeviceAllocator::walk(std::span<const Step> steps, Attempt& attempt) {
  for (const Step& step : steps) {
    if (step.may_block && !active_pools_.empty()) continue;
    if (Block* block = (this->*step.try_it)(attempt)) {
      if (step.rung) ++stats_.served[static_cast<std::size_t>(*step.rung)];
      return block;
    }
    if (attempt.starts_again) break;
  }
  return nullptr;
}

// A block for a request. nullptr beyond a limit.
Block* DeviceAllocator::climb(Attempt& attempt) {
  using D = DeviceAllocator;
  static constexpr Step kLadder[] = {
      {Rung::cached, &D::try_cached, false},
      {Rung::ended_alias, &D::try_ending_aliases, false},
      {Rung::spilled_before, &D::try_spilled_before, false},
      {Rung::mapped, &D::try_mapping, false},
      {Rung::segment, &D::try_segment, false},
      // The budget is spent.
      {{}, &D::try_gathering, true},
      {{}, &D::try_waiting, true},
      {Rung::room_made, &D::try_making_room, true},
      {Rung::spilled, &D::try_spilling, false},
      // A limit is met, or a source has no more.
      {Rung::waited, &D::try_waiting_for_all, true},
      {{}, &D::try_full_device, true},
      {{}, &D::try_without_cache, true},  // starts again
      {Rung::spilled, &D::try_spilling_from_full_device, false},
  };
  Block* block = nullptr;
  do {
    attempt.starts_again = false;
    block = walk(kLadder, attempt);
  } while (attempt.starts_again);
  return block;
}

Block* DeviceAllocator::try_cached(Attempt& attempt) {
  Block* block = take_cached(attempt.heap, attempt.bytes);
  if (block == nullptr && !attempt.stopwatch) attempt.stopwatch.emplace(stats_.uncached_ns);
  return block;
}

// Free aliases end one by one: the others may serve again.
Block* DeviceAllocator::try_ending_aliases(Attempt& attempt) {
  Heap& heap = attempt.heap;
  Block* block = nullptr;
  while (block == nullptr && !heap.free_aliases.empty()) {
    mapped_.end_alias(heap.free_aliases.back());
    block = take_cached(heap, attempt.bytes);
  }
  return block;
}

Block* DeviceAllocator::try_spilled_before(Attempt& attempt) {
  const Heap& heap = attempt.heap;
  if (heap.kind != MemoryKind::pinned || heap.tier != Tier::large ||
      routes_.is_spill(heap))
    return nullptr;
  return take_cached(heap_for(routes_.large_pinned_spill(), heap.stream, heap.pool), attempt.bytes);
}

// Whether new memory for a request would exceed the budget.
bool DeviceAllocator::exceeds_budget(const Attempt& attempt) const {
  return budget_.excludes(attempt.heap, attempt.new_bytes());
}

Block* DeviceAllocator::try_mapping(Attempt& attempt) {
  attempt.growth = mapped_.growth_for(attempt.heap, attempt.bytes);
  attempt.exceeds_budget = exceeds_budget(attempt);
  return attempt.exceeds_budget || attempt.growth.bytes == 0 ? nullptr : take_growth(attempt);
}

Block* DeviceAllocator::take_growth(Attempt& attempt) {
  if (!expand(attempt.heap, attempt.growth, attempt.shortage)) return nullptr;
  Block* block = take_cached(attempt.heap, attempt.bytes);
  // Meanwhile other threads may have taken the free memory beside it.
  attempt.starts_again = block == nullptr;
  return block;
}

Block* DeviceAllocator::try_segment(Attempt& attempt) {
  if (attempt.exceeds_budget || attempt.growth.bytes != 0) return nullptr;
  return new_segment(attempt.heap, attempt.bytes, attempt.shortage);
}

// A block from memory that streams have free, without the host waiting for any of them: what they
// have borrowed of this heap's, or the heap's own at other addresses, or what it borrows. The
// queues of umem's own streams are long: memory of theirs is waited for last. In the end all free
// memory is where it belongs.
Block* DeviceAllocator::try_gathering(Attempt& attempt) {
  using D = DeviceAllocator;
  static constexpr Step kGathering[] = {
      {Rung::taken_back, &D::try_taking_back<Streams::programs>, true},
      {Rung::alias, &D::try_alias, true},
      {Rung::ended_alias, &D::try_ending_aliases, true},
      {Rung::borrowed, &D::try_borrowing<Streams::programs>, true},
      {Rung::taken_back, &D::try_taking_back<Streams::all>, true},
      {Rung::alias, &D::try_alias, true},
      {Rung::ended_alias, &D::try_ending_aliases, true},
      {Rung::borrowed, &D::try_borrowing<Streams::all>, true},
      {Rung::alias, &D::try_gathered_alias, true},
      {Rung::borrowed, &D::try_borrowing<Streams::all>, true},
  };
  if (!attempt.exceeds_budget) return nullptr;
  settle_freed();
  Block* block = walk(kGathering, attempt);
  if (block == nullptr) attempt.growth = mapped_.growth_for(attempt.heap, attempt.bytes);
  return block;
}

template <Streams from>
Block* DeviceAllocator::try_taking_back(Attempt& attempt) {
  take_back(&attempt.heap, from);
  return take_cached(attempt.heap, attempt.bytes);
}

Block* DeviceAllocator::try_alias(Attempt& attempt) {
  attempt.growth = mapped_.growth_for(attempt.heap, attempt.bytes);
  if (attempt.growth.bytes == 0) return nullptr;
  const bool may_grow =
      budget_.excess_bytes(attempt.growth.bytes) <= movable_bytes(attempt.growth);
  return mapped_.alias(attempt.heap, attempt.bytes, attempt.growth, may_grow);
}

template <Streams from>
Block* DeviceAllocator::try_borrowing(Attempt& attempt) {
  return borrow(attempt.heap, attempt.bytes, from);
}

Block* DeviceAllocator::try_gathered_alias(Attempt& attempt) {
  gather_free_memory();
  return try_alias(attempt);
}

Block* DeviceAllocator::try_waiting(Attempt& attempt) {
  if (!attempt.exceeds_budget || !waiting_helps(attempt)) return nullptr;
  synchronize_events();
  return try_gathering(attempt);
}

// Gives cached memory back.
Block* DeviceAllocator::try_making_room(Attempt& attempt) {
  if (!attempt.exceeds_budget) return nullptr;
  const bool is_mapped = attempt.growth.bytes != 0;
  const bool room_was_made =
      make_room(attempt.heap, is_mapped ? attempt.bytes : attempt.new_bytes(),
                budget_.excess_bytes(attempt.new_bytes()), attempt.growth);
  attempt.exceeds_budget = exceeds_budget(attempt);
  if (attempt.exceeds_budget) return nullptr;
  if (is_mapped) return take_growth(attempt);
  Block* block = new_segment(attempt.heap, attempt.bytes, attempt.shortage);
  if (block != nullptr) block->segment->room_was_made = room_was_made;
  return block;
}

Block* DeviceAllocator::try_spilling(Attempt& attempt) {
  if (!attempt.exceeds_budget && attempt.shortage.limit != Limit::device_budget)
    return nullptr;
  mapped_.release_moving();
  attempt.shortage.over_budget = true;
  return spill(attempt);
}

// A block on the host.
Block* DeviceAllocator::spill(Attempt& attempt) {
  const Heap& heap = attempt.heap;
  Heap& on_host = heap_for(routes_.spill_route_for(attempt.tensor_class, heap.tier), heap.stream,
                           heap.pool);
  if (Block* block = take_cached(on_host, attempt.bytes)) return block;
  return new_segment(on_host, attempt.bytes, attempt.shortage);
}

Block* DeviceAllocator::try_waiting_for_all(Attempt& attempt) {
  if (attempt.has_emptied_cache) return nullptr;
  ++stats_.num_alloc_retries;
  synchronize_events();
  take_back(&attempt.heap, Streams::all);
  return take_cached(attempt.heap, attempt.bytes);
}

Block* DeviceAllocator::try_full_device(Attempt& attempt) {
  using D = DeviceAllocator;
  static constexpr Step kFullDevice[] = {
      {Rung::alias, &D::try_alias, true},
      {Rung::borrowed, &D::try_borrowing<Streams::all>, true},
      {Rung::room_made, &D::try_moving_handles, true},
  };
  if (attempt.has_emptied_cache || attempt.shortage.limit != Limit::source ||
      mapped_.growth_for(attempt.heap, attempt.bytes).bytes == 0)
    return nullptr;
  return walk(kFullDevice, attempt);
}

Block* DeviceAllocator::try_moving_handles(Attempt& attempt) {
  const Range& growth = attempt.growth;
  if (!make_room(attempt.heap, attempt.bytes, growth.bytes, growth) ||
      !expand(attempt.heap, growth, attempt.shortage))
    return nullptr;
  return take_cached(attempt.heap, attempt.bytes);
}

// Gives all of the cache back, and tries everything again, once.
Block* DeviceAllocator::try_without_cache(Attempt& attempt) {
  if (attempt.has_emptied_cache) return nullptr;
  gather_free_memory();
  release_spares(segments_.spares());
  attempt.has_emptied_cache = attempt.starts_again = true;
  return nullptr;
}

// Others use the device too: it may be full before the budget is spent.
Block* DeviceAllocator::try_spilling_from_full_device(Attempt& attempt) {
  const Shortage& shortage = attempt.shortage;
  const bool device_is_full = attempt.has_emptied_cache && !shortage.over_budget &&
                              shortage.limit == Limit::source && budget_.limit_bytes() != 0 &&
                              attempt.heap.on_device;
  return device_is_full ? spill(attempt) : nullptr;
}

}  // namespace umem
