// Room within the budget: which cached memory gives way to a request, and whether waiting helps.
//
// Note [Steady steps]
//
// A steady step allocates and frees no segments. In one heap of segments this follows by itself:
// segments are given back for a larger one, which then serves what they served. Two heaps, such as
// those of two streams, could take each other's segments in every step. So if a segment is given
// back for a request that is no larger, and its heap then needs a new one, the heap keeps its
// segments until 65,536 such requests have been turned away, and then twice as many
// (Heap::patience). Meanwhile the smaller requests are on the host. Nor is room made again for
// requests of a size if it was made for two of them and smaller ones have taken it since; after
// 65,536 such requests it is tried anew.
//
// Handles of expandable segments do pass on in every step. Where they did not, temporary tensors
// of updates were on the host, and took 220 ms of a step (DeepSpeed's ZeRO-2, 0.56 billion
// parameters, from a profile read by hand: H100 80 GB, driver 580.159.04, torch 2.11, 2026-11-26).
#include <algorithm>
#include <set>
#include <unordered_set>

#include "core/device_allocator.hpp"

namespace umem {
namespace {

constexpr std::size_t kMostInVain = 2;  // segments that room was made for in vain

// Moves spares of `bytes` together from `from` to `taken`, or all of them if they are less: the
// smallest one that is enough, or else the largest ones, so that few are given back. Of the handles
// of an expandable segment, no more than needed. Returns how many bytes they have.
std::size_t take_least(std::vector<Spare> from, std::size_t bytes, std::vector<Spare>& taken) {
  std::sort(from.begin(), from.end(),
            [](const Spare& a, const Spare& b) { return a.bytes < b.bytes; });
  std::size_t taken_bytes = 0;
  while (!from.empty() && taken_bytes < bytes) {
    auto enough = std::find_if(from.begin(), from.end(), [&](const Spare& spare) {
      return spare.bytes >= bytes - taken_bytes;
    });
    if (enough == from.end()) --enough;
    if (const Segment& segment = *enough->block->segment; segment.is_expandable)
      enough->bytes = std::min(
          enough->bytes,
          round_up(bytes - taken_bytes, segment.heap->expandable->handle_bytes()));
    taken_bytes += enough->bytes;
    taken.push_back(*enough);
    from.erase(enough);
  }
  return taken_bytes;
}

}  // namespace

// Whether a request beyond the budget can be served when other streams have finished: from a block
// of its heap, from free memory of its heap at other addresses, or because memory can be given back
// only then. Waiting stalls the program.
bool DeviceAllocator::waiting_helps(const Attempt& attempt) const {
  const Heap& heap = attempt.heap;
  const std::size_t bytes = attempt.bytes;
  bool serves = false;
  std::unordered_set<const Block*> seen;
  std::size_t freed_bytes = 0, freed_of_heap = 0;
  const auto consider = [&](const Block* block) {
    if (seen.contains(block)) return;
    const Segment& segment = *block->segment;
    while (block->previous != nullptr && block->previous->state != BlockState::live)
      block = block->previous;
    Range run{block->address, 0};  // free blocks next to each other
    std::size_t idle_bytes = 0;
    for (; block != nullptr && block->state != BlockState::live; block = block->next) {
      run.bytes += block->bytes;
      seen.insert(block);
      if (block->state == BlockState::cached) idle_bytes += spare_bytes(*block);
    }
    serves = serves || (segment.heap == &heap && run.bytes >= bytes);
    if (segment.heap->pool_in_use() || !segment.heap->on_device) return;
    const std::size_t freed = spare_bytes(segment, run) - idle_bytes;
    freed_bytes += freed;
    if (segment.heap == &heap && segment.is_expandable) freed_of_heap += freed;
  };
  uses_.each_pending(consider);
  const std::size_t excess = budget_.excess_bytes(attempt.new_bytes());
  const std::size_t movable = movable_bytes(attempt.growth);
  if (serves || excess <= movable) return serves;
  for (const Spare& spare : mapped_.spares_of(heap)) freed_of_heap += spare.bytes;
  return excess <= movable + freed_bytes || bytes <= freed_of_heap;
}

// Cached memory on the device, without the blocks beside `growth`: the request will use them.
std::vector<Spare> DeviceAllocator::movable_spares(const Range& growth) const {
  std::vector<Spare> all = segments_.spares();
  std::erase_if(all, [&](const Spare& spare) {
    const Block& block = *spare.block;
    const bool is_used = growth.bytes != 0 && (block.address + block.bytes == growth.address ||
                                               block.address == growth.address + growth.bytes);
    return is_used || !spare.block->segment->heap->on_device;
  });
  return all;
}

std::size_t DeviceAllocator::movable_bytes(const Range& growth) const {
  std::size_t bytes = 0;
  for (const Spare& spare : movable_spares(growth)) bytes += spare.bytes;
  return bytes;
}

// Gives back `excess` bytes of cached memory on the device for a request of `heap`; none if there
// is less. First the heap's own: it is all too small for the request, and what it served is served
// by the new memory. Last that of umem's own streams, whose queues are long. False if none are
// given back.
bool DeviceAllocator::make_room(Heap& heap, std::size_t bytes, std::size_t excess,
                                const Range& growth) {
  if (excess > segments_.idle_device_bytes()) return false;
  if (room_was_in_vain(heap, bytes)) {
    if (++heap.in_vain < kLeastPatience) return false;
    heap.in_vain = 0;
  }
  std::array<std::vector<Spare>, 4> ranks;  // of this heap, smaller ones, others, own streams'
  std::set<Heap*> keeping;
  for (const Spare& spare : movable_spares(growth)) {
    const Block& block = *spare.block;
    Heap& owner = *block.segment->heap;
    const bool moves_handles = growth.bytes != 0 && block.segment->is_expandable;
    const bool is_smaller = block.bytes < bytes;
    if (!is_smaller && !moves_handles && owner.turned_away < owner.patience)
      keeping.insert(&owner);
    else if (&owner == &heap)
      ranks[0].push_back(spare);
    else
      ranks[!uses_.are(Streams::programs, owner.stream) ? 3 : is_smaller ? 1 : 2].push_back(spare);
  }
  std::vector<Spare> given;
  std::size_t given_bytes = 0;
  for (std::vector<Spare>& rank : ranks)
    if (given_bytes < excess)
      given_bytes += take_least(std::move(rank), excess - given_bytes, given);
  if (given_bytes < excess) {
    for (Heap* owner : keeping) ++owner->turned_away;
    return false;
  }
  for (const Spare& spare : given)
    if (spare.block->bytes >= bytes) spare.block->segment->heap->lent = true;
  const bool any = !given.empty();
  if (growth.bytes != 0) mapped_.keep_handles_for(heap);
  release_spares(std::move(given));
  mapped_.keep_no_handles();
  return any;
}

// Whether room was made for requests of this size before, and smaller ones have taken it since.
// With little to spare, that would repeat in every step.
bool DeviceAllocator::room_was_in_vain(const Heap& heap, std::size_t bytes) const {
  std::size_t taken = 0;
  for (const auto& [address, segment] : segments_) {
    if (!segment.room_was_made || segment.heap != &heap || segment.bytes < bytes ||
        segment.bytes > bytes + bytes / 4)
      continue;
    bool serves = false;
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      serves = serves || (block->state != BlockState::cached && block->bytes + kPageBytes > bytes);
    if (!serves) ++taken;
  }
  return taken >= kMostInVain;
}

// Gives back cached memory, as far as `more_bytes` exceed the budget.
void DeviceAllocator::trim_to_budget(std::size_t more_bytes) {
  if (budget_.excess_bytes(more_bytes) == 0 || !active_pools_.empty()) return;
  synchronize_events();
  gather_free_memory();
  std::vector<Spare> cached = segments_.spares(), given;
  std::erase_if(cached,
                [](const Spare& spare) { return !spare.block->segment->heap->on_device; });
  take_least(std::move(cached), budget_.excess_bytes(more_bytes), given);
  release_spares(std::move(given));
}

}  // namespace umem
