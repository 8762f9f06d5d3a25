// Segments: how large they are, where they come from within the limits, and what makes room.
#include <algorithm>
#include <set>
#include <unordered_set>

#include "core/device_allocator.hpp"

namespace umem {
namespace {

// Segment sizes follow torch's: they decide how much memory small requests reserve.
constexpr std::size_t kSmallSegmentBytes = kPageBytes;
constexpr std::size_t kSmallRequestBytes = std::size_t{1} << 20;
constexpr std::size_t kMediumSegmentBytes = std::size_t{8} << 20;  // for requests of 1 to 2 MiB
constexpr std::size_t kLargeSegmentBytes = std::size_t{20} << 20;
constexpr std::size_t kMinExactSegmentBytes = std::size_t{10} << 20;  // from here, just enough
// Page-locking has a cost for each call, so segments of page-locked memory grow with their use.
constexpr std::size_t kMostPinnedSegmentBytes = std::size_t{1} << 30;

// The driver keeps page tables on the card for page-locked memory: 2 MiB for each GiB, measured.
constexpr std::size_t kMappedBytesPerTableByte = 512;

constexpr std::size_t kMostInVain = 2;  // segments that room was made for in vain

std::size_t standard_segment_bytes(Tier tier, std::size_t bytes) {
  if (tier == Tier::small)
    return bytes <= kSmallRequestBytes ? kSmallSegmentBytes : kMediumSegmentBytes;
  return bytes < kMinExactSegmentBytes ? kLargeSegmentBytes : round_up(bytes, kPageBytes);
}

// Moves spares of `bytes` together from `from` to `taken`, or all of them if they are less: the
// smallest one that is enough, or else the largest ones, so that few are given back. Of the handles
// of an expandable segment, no more than needed. Returns how many bytes they have.
template <class Spare>
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

std::vector<LiveBlock> DeviceAllocator::unspill() {
  const BothLocks locks(locks_);
  const auto may_move = [this](const Block& block) {
    const Profile& profile = routes_.profile(routes_.profile_of(block.tensor_class));
    return block.state == BlockState::live && block.advice == routes_.managed_spill_profile() &&
           profile.kind == MemoryKind::managed && resides_on_device(profile);
  };
  std::vector<std::uintptr_t> spilled;
  for (const auto& [address, segment] : segments_) {
    const Heap& heap = *segment.heap;
    if (heap.profile != routes_.managed_spill_profile() || heap.tier != Tier::large) continue;
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      if (may_move(*block)) spilled.push_back(block->address);
  }
  std::vector<LiveBlock> moved;
  for (const std::uintptr_t address : spilled) {
    Block* block = segments_.live_block(address);
    if (block == nullptr || !may_move(*block)) continue;  // freed during an earlier block's call
    moved.push_back(live(*block));
    count_unspilled(*block, true);
    apply_advice(block, routes_.profile_of(block->tensor_class));
  }
  return moved;
}

bool DeviceAllocator::unspilled(const Block& block) const {
  const std::uint8_t spilled = routes_.managed_spill_profile();
  return block.segment->heap->profile == spilled && block.advice != spilled;
}

// The budget does not count spilled bytes.
void DeviceAllocator::count_unspilled(const Block& block, bool on_device) {
  std::size_t& spilled_bytes =
      kind_stats_[static_cast<std::size_t>(MemoryKind::managed)].spilled_bytes;
  if (on_device) {
    spilled_bytes -= block.bytes;
    stats_.budget_bytes.increase(block.bytes);
  } else {
    spilled_bytes += block.bytes;
    stats_.budget_bytes.decrease(block.bytes);
  }
}

// By how much `more_bytes` on the device would exceed the budget.
std::size_t DeviceAllocator::excess_bytes(std::size_t more_bytes) const {
  const std::size_t bytes = static_cast<std::size_t>(stats_.budget_bytes.current) + more_bytes;
  return budget_bytes_ == 0 || bytes <= budget_bytes_ ? 0 : bytes - budget_bytes_;
}

bool DeviceAllocator::over_budget(const Heap& heap, std::size_t bytes) const {
  return heap.on_device && excess_bytes(bytes) != 0;
}

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
  const std::size_t excess = excess_bytes(attempt.new_bytes());
  const std::size_t movable = movable_bytes(attempt.growth);
  if (serves || excess <= movable) return serves;
  for (const Spare& spare : mapped_spares(heap)) freed_of_heap += spare.bytes;
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
  if (growth.bytes != 0) moving_.handle_bytes = heap.expandable->handle_bytes();
  release_spares(std::move(given));
  moving_.handle_bytes = 0;
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

// Counts `bytes` for a heap against every limit. False beyond one.
bool DeviceAllocator::reserve(const Heap& heap, std::size_t bytes, Shortage& shortage) {
  if (fraction_ < 1.0) {
    const MemoryInfo memory = locks_.unlocked([&] { return driver_.memory(device_); });
    const auto limit =
        static_cast<std::size_t>(fraction_ * static_cast<double>(memory.total_bytes));
    if (static_cast<std::size_t>(stats_.reserved_bytes.all.current) + bytes > limit) {
      shortage.limit = Shortage::Limit::memory_fraction;
      return false;
    }
  }
  if (over_budget(heap, bytes)) {  // by what alignment costs
    shortage.limit = Shortage::Limit::device_budget;
    return false;
  }
  if (SharedLimit* limit = limits_.of(heap.kind); limit != nullptr && !limit->take(bytes)) {
    shortage.limit = heap.kind == MemoryKind::managed ? Shortage::Limit::managed
                                                         : Shortage::Limit::pinned;
    return false;
  }
  return true;
}

void DeviceAllocator::release_reserve(MemoryKind kind, std::size_t bytes) {
  if (SharedLimit* limit = limits_.of(kind)) limit->give_back(bytes);
}

std::size_t DeviceAllocator::segment_bytes_for(const Heap& heap, std::size_t bytes) const {
  const std::size_t standard_bytes = standard_segment_bytes(heap.tier, bytes);
  if (heap.kind != MemoryKind::pinned) return standard_bytes;
  // At most as much again as is in use: page-locked memory is lost to the host.
  const std::size_t grown_bytes = std::min(segments_.used_bytes(heap), kMostPinnedSegmentBytes);
  return std::max(standard_bytes, grown_bytes / kPageBytes * kPageBytes);
}

Block* DeviceAllocator::new_segment(Heap& heap, std::size_t bytes, Shortage& shortage) {
  const std::size_t least_bytes = round_up(bytes, kPageBytes);
  std::size_t segment_bytes = segment_bytes_for(heap, bytes);
  if (over_budget(heap, segment_bytes)) segment_bytes = least_bytes;

  const auto take = [&](std::size_t raw_bytes) -> void* {
    if (!reserve(heap, raw_bytes, shortage)) return nullptr;
    void* raw = nullptr;
    try {
      raw = locks_.unlocked([&] { return source_.allocate(heap.kind, device_, raw_bytes); });
    } catch (...) {
      release_reserve(heap.kind, raw_bytes);
      throw;
    }
    if (raw == nullptr) {
      shortage.limit = Shortage::Limit::source;
      release_reserve(heap.kind, raw_bytes);
    }
    return raw;
  };
  std::size_t raw_bytes = 0;
  const auto take_aligned = [&](std::size_t wanted_bytes) -> void* {
    raw_bytes = wanted_bytes;
    void* raw = take(raw_bytes);
    if (raw == nullptr || reinterpret_cast<std::uintptr_t>(raw) % kPageBytes == 0) return raw;
    locks_.unlocked([&] { source_.deallocate(heap.kind, device_, raw, raw_bytes); });
    release_reserve(heap.kind, raw_bytes);
    raw_bytes = wanted_bytes + kPageBytes;  // sources guarantee 256 bytes
    return take(raw_bytes);
  };

  void* raw = take_aligned(segment_bytes);
  if (raw == nullptr && segment_bytes > least_bytes) {  // allocate the request alone
    segment_bytes = least_bytes;
    raw = take_aligned(segment_bytes);
  }
  if (raw == nullptr) return nullptr;

  const std::uintptr_t address = round_up(reinterpret_cast<std::uintptr_t>(raw), kPageBytes);
  Segment fresh{.address = address,
                .bytes = segment_bytes,
                .raw = raw,
                .raw_bytes = raw_bytes,
                .heap = &heap};
  prepare(fresh);
  if (heap.kind == MemoryKind::pinned) count_page_tables(segment_bytes);

  // From here on the lock is held: the block is in no heap until it is handed out.
  Block* block = segments_.add(fresh);

  ++stats_.num_device_alloc;
  stats_.reserved_bytes.increase(heap.tier, segment_bytes);
  KindStats& kind = kind_stats_[static_cast<std::size_t>(heap.kind)];
  kind.reserved_bytes += segment_bytes;
  if (routes_.is_spill(heap)) kind.spilled_bytes += segment_bytes;
  if (heap.on_device) stats_.budget_bytes.increase(raw_bytes);
  system_bytes_ += fresh.device_bytes;
  heap.grow_patient();
  if (heap.pool != nullptr) {
    ++heap.pool->segments;
    heap.pool->reserved_bytes += segment_bytes;
  }
  segments_.cut(block, bytes);
  return block;
}

// Gives the pages of a segment that is not in the books yet their advice and their home.
void DeviceAllocator::prepare(Segment& segment) {
  const Profile& profile = routes_.profile(segment.heap->profile);
  const Range range{segment.address, segment.bytes};
  bool is_advised = true, is_populated = true;
  locks_.unlocked([&] {
    if (profile.kind == MemoryKind::system)
      segment.device_bytes = std::min(segment.bytes, room_beside_headroom());
    if (takes_advice(profile.kind) && profile.advice != Advice{})
      is_advised = advise(segment, range, segment.heap->profile);
    if (profile.kind == MemoryKind::managed && profile.advice.placement == Placement::device)
      is_populated = config_.prefetches && driver_.populate(device_, range);
  });
  note_hint(is_advised, has_warned_of_advice_, "advice");
  note_hint(is_populated, has_warned_of_prefetch_, "prefetch");
}

// Device memory that new memory of kind `system` may take, in whole pages. Untouched pages take
// none yet, so that the driver calls them free: what was advised before counts as taken, too.
std::size_t DeviceAllocator::room_beside_headroom() const {
  if (config_.system_headroom_bytes == 0) return SIZE_MAX;
  const MemoryInfo memory = driver_.memory(device_);
  const auto less = [](std::size_t bytes, std::size_t by) { return bytes > by ? bytes - by : 0; };
  const std::size_t room = std::min(memory.free_bytes, less(memory.total_bytes, system_bytes_));
  return less(room, config_.system_headroom_bytes) / kPageBytes * kPageBytes;
}

void DeviceAllocator::set_device_budget(std::size_t bytes) {
  const BothLocks locks(locks_);
  budget_bytes_ = bytes;
  trim_to_budget(0);
}

void DeviceAllocator::count_page_locked(std::ptrdiff_t bytes) {
  const BothLocks locks(locks_);
  others_locked_bytes_ += bytes;
  count_page_tables();
}

// Counts those of page-locked memory as it is now, and of `more_locked_bytes`, against the budget.
void DeviceAllocator::count_page_tables(std::size_t more_locked_bytes) {
  const std::size_t mapped_bytes =
      kind_stats_[static_cast<std::size_t>(MemoryKind::pinned)].reserved_bytes +
      static_cast<std::size_t>(others_locked_bytes_) + more_locked_bytes;
  const std::size_t bytes = mapped_bytes / kMappedBytesPerTableByte / kPageBytes * kPageBytes;
  if (bytes > page_table_bytes_) {
    trim_to_budget(bytes - page_table_bytes_);
    stats_.budget_bytes.increase(bytes - page_table_bytes_);
  } else {
    stats_.budget_bytes.decrease(page_table_bytes_ - bytes);
  }
  page_table_bytes_ = bytes;
}

// Gives back cached memory, as far as `more_bytes` exceed the budget.
void DeviceAllocator::trim_to_budget(std::size_t more_bytes) {
  if (excess_bytes(more_bytes) == 0 || !active_pools_.empty()) return;
  synchronize_events();
  gather_free_memory();
  std::vector<Spare> cached = segments_.spares(), given;
  std::erase_if(cached, [this](const Spare& spare) { return !spare.block->segment->heap->on_device; });
  take_least(std::move(cached), excess_bytes(more_bytes), given);
  release_spares(std::move(given));
}

}  // namespace umem
