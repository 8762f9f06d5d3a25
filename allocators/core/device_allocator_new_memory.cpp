// New memory within the limits: mapped handles, and segments, how large and where from.
//
// Note [Sizes of segments]
//
// Segments from RMM are whole 2 MiB, of torch's sizes, which decide how much memory small requests
// reserve. Segments of page-locked memory grow with their use, because registering has a cost for
// each call: a new one is at most as large as what the heap has in use, since locked memory is
// lost to the host. In each segment, requests lie one after the other in their order, so that a
// run of adjacent tensors is copied by one call.
//
// Note [Fresh pages]
//
// A managed page has no place until its first access, and a first access by the GPU is a page
// fault. So a fresh segment with `placement: device` is prefetched to the device once, on a
// separate stream, unless the card has no room for it.
//
// Note [System memory]
//
// Memory of kind `system` is mapped by umem on boundaries of 2 MiB, so that no segment is asked
// for twice. Its pages that were advised and never touched take no device memory yet, and count as
// taken beside the headroom. Freeing it waits for nothing, so a segment first waits for its
// stream; one whose stream is being captured stays.
#include <algorithm>

#include "core/device_allocator.hpp"

namespace umem {
namespace {

constexpr std::size_t kSmallSegmentBytes = kPageBytes;
constexpr std::size_t kSmallRequestBytes = std::size_t{1} << 20;
constexpr std::size_t kMediumSegmentBytes = std::size_t{8} << 20;  // for requests of 1 to 2 MiB
constexpr std::size_t kLargeSegmentBytes = std::size_t{20} << 20;
constexpr std::size_t kMinExactSegmentBytes = std::size_t{10} << 20;  // from here, just enough

std::size_t standard_segment_bytes(Tier tier, std::size_t bytes) {
  if (tier == Tier::small)
    return bytes <= kSmallRequestBytes ? kSmallSegmentBytes : kMediumSegmentBytes;
  return bytes < kMinExactSegmentBytes ? kLargeSegmentBytes : round_up(bytes, kPageBytes);
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
  spilled_bytes += on_device ? -block.bytes : block.bytes;
  stats_.budget_bytes.change(block.bytes, on_device);
}

// Counts new memory of a heap against every limit. False beyond one.
bool DeviceAllocator::reserve(const Heap& heap, std::size_t bytes, Shortage& shortage) {
  std::size_t total_bytes = 0;
  if (budget_.fraction() < 1.0)
    total_bytes = locks_.unlocked([&] { return driver_.memory(device_); }).total_bytes;
  const std::optional<Limit> limit =
      budget_.take(heap, bytes, total_bytes,
                   static_cast<std::size_t>(stats_.reserved_bytes.all.current));
  if (limit) shortage.limit = *limit;
  return !limit;
}

std::size_t DeviceAllocator::segment_bytes_for(const Heap& heap, std::size_t bytes) const {
  const std::size_t standard_bytes = standard_segment_bytes(heap.tier, bytes);
  if (heap.kind != MemoryKind::pinned) return standard_bytes;
  const std::size_t grown_bytes = std::min(segments_.used_bytes(heap), kMostPinnedSegmentBytes);
  return std::max(standard_bytes, grown_bytes / kPageBytes * kPageBytes);
}

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
  count_memory(heap, growth.bytes, growth.bytes, true);
  segments_.add_mapped(heap, growth);
  return true;
}

// Counts memory that a heap gets, or that has left it; the budget counts what its source has given.
void DeviceAllocator::count_memory(const Heap& heap, std::size_t bytes, std::size_t raw_bytes,
                                   bool more) {
  ++(more ? stats_.num_device_alloc : stats_.num_device_free);
  stats_.reserved_bytes.change(heap.tier, bytes, more);
  if (heap.on_device) stats_.budget_bytes.change(raw_bytes, more);
  KindStats& kind = kind_stats_[static_cast<std::size_t>(heap.kind)];
  kind.reserved_bytes += more ? bytes : -bytes;
  if (routes_.is_spill(heap)) kind.spilled_bytes += more ? bytes : -bytes;
}

Block* DeviceAllocator::new_segment(Heap& heap, std::size_t bytes, Shortage& shortage) {
  const std::size_t least_bytes = round_up(bytes, kPageBytes);
  std::size_t segment_bytes = segment_bytes_for(heap, bytes);
  if (budget_.excludes(heap, segment_bytes)) segment_bytes = least_bytes;

  const auto take = [&](std::size_t raw_bytes) -> void* {
    if (!reserve(heap, raw_bytes, shortage)) return nullptr;
    void* raw = nullptr;
    try {
      raw = locks_.unlocked([&] { return source_.allocate(heap.kind, device_, raw_bytes); });
    } catch (...) {
      budget_.give_back(heap.kind, raw_bytes);
      throw;
    }
    if (raw == nullptr) {
      shortage.limit = Limit::source;
      budget_.give_back(heap.kind, raw_bytes);
    }
    return raw;
  };
  std::size_t raw_bytes = 0;
  const auto take_aligned = [&](std::size_t wanted_bytes) -> void* {
    raw_bytes = wanted_bytes;
    void* raw = take(raw_bytes);
    if (raw == nullptr || reinterpret_cast<std::uintptr_t>(raw) % kPageBytes == 0) return raw;
    locks_.unlocked([&] { source_.deallocate(heap.kind, device_, raw, raw_bytes); });
    budget_.give_back(heap.kind, raw_bytes);
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
  Block* block = add_segment(fresh);
  segments_.cut(block, bytes);
  return block;
}

// Books a segment. The lock is held from here on: its block is in no heap yet.
Block* DeviceAllocator::add_segment(const Segment& fresh) {
  Heap& heap = *fresh.heap;
  if (heap.kind == MemoryKind::pinned) count_page_tables(fresh.bytes);
  Block* block = segments_.add(fresh);
  count_memory(heap, fresh.bytes, fresh.raw_bytes, true);
  system_bytes_ += fresh.device_bytes;
  heap.grow_patient();
  if (heap.pool != nullptr) {
    ++heap.pool->segments;
    heap.pool->reserved_bytes += fresh.bytes;
  }
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

// Device memory that new memory of kind `system` may take, in whole pages.
std::size_t DeviceAllocator::room_beside_headroom() const {
  if (config_.system_headroom_bytes == 0) return SIZE_MAX;
  const MemoryInfo memory = driver_.memory(device_);
  const auto less = [](std::size_t bytes, std::size_t by) { return bytes > by ? bytes - by : 0; };
  const std::size_t room = std::min(memory.free_bytes, less(memory.total_bytes, system_bytes_));
  return less(room, config_.system_headroom_bytes) / kPageBytes * kPageBytes;
}

void DeviceAllocator::set_device_budget(std::size_t bytes) {
  const BothLocks locks(locks_);
  budget_.set_limit(bytes);
  trim_to_budget(0);
}

void DeviceAllocator::count_page_locked(std::ptrdiff_t bytes) {
  const BothLocks locks(locks_);
  budget_.add_locked_by_others(bytes);
  count_page_tables();
}

// Counts those of page-locked memory as it is now, and of `more_locked_bytes`, against the budget.
void DeviceAllocator::count_page_tables(std::size_t more_locked_bytes) {
  const std::size_t bytes = budget_.page_table_bytes(
      kind_stats_[static_cast<std::size_t>(MemoryKind::pinned)].reserved_bytes + more_locked_bytes);
  if (bytes > budget_.page_table_bytes()) trim_to_budget(bytes - budget_.page_table_bytes());
  budget_.set_page_table_bytes(bytes);
}

}  // namespace umem
