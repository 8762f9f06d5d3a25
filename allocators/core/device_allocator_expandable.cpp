// Plain device memory that grows by mapped handles: where they are mapped, and when they are not.
#include <algorithm>
#include <bit>

#include "core/device_allocator.hpp"

namespace umem {
namespace {

// Handles are the unit in which memory passes between heaps, and a hole between two tensors keeps
// less than two of them. The driver takes its time for each, whatever its size (about 40 µs to map
// one). Fewer handles to a budget, or larger ones, leave no room for tensors that a plan counts on.
constexpr std::size_t kLeastHandleBytes = kPageBytes;
constexpr std::size_t kMostHandleBytes = 4 * kPageBytes;
constexpr std::size_t kHandlesPerBudget = 192;

// Addresses cost nothing, and holes in them must never be what a heap lacks.
constexpr std::size_t kGrowthPerByte = 2, kAliasPerByte = 1;

}  // namespace

// nullptr where it does not serve this device. Asked for when it is first needed: installing an
// allocator makes no CUDA context.
VirtualMemory* DeviceAllocator::virtual_memory() {
  if (!virtual_memory_.has_value()) {
    VirtualMemory* memory = driver_.virtual_memory();
    const std::size_t granularity = memory == nullptr ? 0 : memory->granularity(device_);
    virtual_memory_ = granularity != 0 && kPageBytes % granularity == 0 ? memory : nullptr;
  }
  return *virtual_memory_;
}

std::size_t DeviceAllocator::large_handle_bytes() const {
  if (budget_.limit_bytes() == 0) return kMostHandleBytes;
  return std::clamp(std::bit_floor(budget_.limit_bytes() / kHandlesPerBudget), kLeastHandleBytes,
                    kMostHandleBytes);
}

// Whether the heap has, or now gets, an expandable segment. Memory of graphs has segments of its
// own: it stays where it is until the graph is gone.
bool DeviceAllocator::can_expand(Heap& heap) {
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

// Where the fewest mapped handles make a cached block of `bytes`: at one side of a hole, beside the
// free memory there, or in all of it; rather where nothing must be unmapped before. 0 bytes where
// the heap does not grow by handles, or its addresses have no place.
Range DeviceAllocator::growth_for(Heap& heap, std::size_t bytes) {
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

// Maps `growth` as cached memory; handles that were given back for it are used first.
bool DeviceAllocator::expand(Heap& heap, const Range& growth, Shortage& shortage) {
  if (!reserve(heap, growth.bytes, shortage)) {
    release_moving();
    return false;
  }
  EventId last_use = 0;  // of what is mapped there
  if (heap.expandable->shadow_bytes(growth) != 0 && (last_use = uses_.record({heap.stream})) == 0) {
    release_moving();
    shortage.limit = Limit::source;
    return false;
  }
  if (!locks_.unlocked([&] {
        if (last_use != 0) driver_.wait(last_use);
        return heap.expandable->map(growth, moving_);
      })) {
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

// Gives handles back that found no place.
void DeviceAllocator::release_moving() {
  if (!moving_.handles.empty()) locks_.unlocked([&] { release(*virtual_memory(), moving_); });
}

bool DeviceAllocator::add_peer(int peer) {
  const BothLocks locks(locks_);
  if (virtual_memory() == nullptr) return true;
  std::vector<Range> mapped;
  for (const auto& [stream, heaps] : heaps_)
    for (const std::unique_ptr<Heap>& heap : heaps)
      if (heap != nullptr && heap->expandable != nullptr) heap->expandable->append_mapped(mapped);
  return locks_.unlocked([&] { return virtual_memory()->add_peer(device_, peer, mapped); });
}

void DeviceAllocator::stop_mapping() {
  const BothLocks locks(locks_);
  virtual_memory_ = nullptr;
  gather_free_memory();
  if (active_pools_.empty()) release_spares(segments_.spares());
}

}  // namespace umem
