#include "core/mapped_memory.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace umem {
namespace {

// The driver takes its time for each handle, whatever its size (about 40 µs to map one). Fewer of
// them to a budget, or larger ones, leave no room for tensors that a plan counts on.
constexpr std::size_t kLeastHandleBytes = kPageBytes;
constexpr std::size_t kMostHandleBytes = 4 * kPageBytes;
constexpr std::size_t kHandlesPerBudget = 192;

// Addresses cost nothing, and holes in them must never be what a heap lacks.
constexpr std::size_t kGrowthPerByte = 2, kAliasPerByte = 1;

// An alias is one block: what it has beyond the request is lost meanwhile.
constexpr std::size_t kRequestPerLoss = 8;

}  // namespace

Block* free_alias(const Heap& heap, std::size_t bytes) {
  for (Block* block : heap.free_aliases)
    if (block->bytes >= bytes && block->bytes - bytes < heap.expandable->handle_bytes())
      return block;
  return nullptr;
}

VirtualMemory* MappedMemory::virtual_memory() {
  if (!virtual_memory_.has_value()) {
    VirtualMemory* memory = driver_.virtual_memory();
    const std::size_t granularity = memory == nullptr ? 0 : memory->granularity(device_);
    virtual_memory_ = granularity != 0 && kPageBytes % granularity == 0 ? memory : nullptr;
  }
  return *virtual_memory_;
}

std::size_t MappedMemory::large_handle_bytes() const {
  if (budget_.limit_bytes() == 0) return kMostHandleBytes;
  return std::clamp(std::bit_floor(budget_.limit_bytes() / kHandlesPerBudget), kLeastHandleBytes,
                    kMostHandleBytes);
}

// Whether the heap has, or now gets, an expandable segment. Memory of graphs has segments of its
// own: it stays where it is until the graph is gone.
bool MappedMemory::can_expand(Heap& heap) {
  if (heap.pool != nullptr || heap.kind != MemoryKind::device ||
      virtual_memory() == nullptr)
    return false;
  if (heap.expandable == nullptr)
    heap.expandable = locks_.unlocked([&] {
      const std::size_t total_bytes = driver_.memory(device_).total_bytes;
      const bool is_small = heap.tier == Tier::small;
      return ExpandableSegment::reserve(*virtual_memory(), device_, kGrowthPerByte * total_bytes,
                                        is_small ? 0 : kAliasPerByte * total_bytes,
                                        is_small ? kLeastHandleBytes : large_handle_bytes());
    });
  return heap.expandable != nullptr;
}

Range MappedMemory::growth_for(Heap& heap, std::size_t bytes) {
  if (!can_expand(heap)) return {};
  const Range addresses = heap.expandable->addresses();
  const std::size_t handle_bytes = heap.expandable->handle_bytes();
  const std::uintptr_t end = addresses.address + addresses.bytes;
  Range best{};
  std::size_t least_cost = SIZE_MAX;
  const auto consider = [&](const Range& range) {
    if (range.bytes >= least_cost) return;
    const std::size_t cost = range.bytes + heap.expandable->shadow_bytes(range);
    if (cost >= least_cost) return;
    least_cost = cost;
    best = range;
  };
  const auto free_bytes = [](const Block* block) {
    return block != nullptr && block->state == BlockState::cached ? block->bytes : 0;
  };
  const auto consider_hole = [&](const Range& hole, const Block* before, const Block* after) {
    const std::size_t left = free_bytes(before), right = free_bytes(after);
    if (hole.bytes == 0 || left + hole.bytes + right < bytes) return;
    if (left + hole.bytes >= bytes) consider({hole.address, round_up(bytes - left, handle_bytes)});
    if (after != nullptr && right + hole.bytes >= bytes) {
      const std::size_t missing = round_up(bytes - right, handle_bytes);
      consider({hole.address + hole.bytes - missing, missing});
    }
    consider(hole);
  };
  std::uintptr_t from = addresses.address;
  const Block* before = nullptr;
  for (auto run = segments_.lower_bound(from); run != segments_.end() && run->first < end; ++run) {
    const Segment& segment = run->second;
    consider_hole({from, segment.address - from}, before, segment.first);
    from = segment.address + segment.bytes;
    before = segment.last;
  }
  consider_hole({from, end - from}, before, nullptr);
  return best;
}

bool MappedMemory::map(Heap& heap, const Range& growth) {
  EventId last_use = 0;  // of what is mapped there
  if (heap.expandable->shadow_bytes(growth) != 0 && (last_use = uses_.record({heap.stream})) == 0) {
    release_moving();
    return false;
  }
  return locks_.unlocked([&] {
    if (last_use != 0) driver_.wait(last_use);
    return heap.expandable->map(growth, moving_);
  });
}

void MappedMemory::release_moving() {
  if (!moving_.handles.empty()) locks_.unlocked([&] { release(*virtual_memory(), moving_); });
}

std::vector<Spare> MappedMemory::spares_of(const Heap& heap) const {
  std::vector<Spare> all = segments_.spares();
  std::erase_if(all, [&](const Spare& spare) {
    return spare.block->segment->heap != &heap || !spare.block->segment->is_expandable;
  });
  return all;
}

Block* MappedMemory::alias(Heap& heap, std::size_t bytes, const Range& growth, bool may_grow) {
  ExpandableSegment& expandable = *heap.expandable;
  const std::size_t whole_bytes = round_up(bytes, expandable.handle_bytes());
  if (whole_bytes - bytes > bytes / kRequestPerLoss) return nullptr;
  std::vector<Spare> all = spares_of(heap);
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
  if (plan->cost > cost_of_growth && may_grow) return nullptr;
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

void MappedMemory::end_alias(Block* block) {
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

void MappedMemory::forget_finished_uses(Heap& heap) {
  for (auto& [address, event] : heap.last_uses)
    if (event != 0 && driver_.finished(event)) event = 0;
  std::erase_if(earlier_uses_, [this](EventId event) { return driver_.finished(event); });
}

void MappedMemory::wait_for_uses(const Heap& heap) {
  for (const auto& [address, event] : heap.last_uses)
    if (event != 0) driver_.wait(event);
}

void MappedMemory::wait_for_earlier_uses() {
  for (const EventId event : earlier_uses_) driver_.wait(event);
}

}  // namespace umem
