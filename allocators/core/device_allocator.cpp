#include "core/device_allocator.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace umem {
namespace {

// Segment sizes follow torch's: they decide how much memory small requests reserve.
constexpr std::size_t kSmallSegmentBytes = kPageBytes;
constexpr std::size_t kSmallRequestBytes = std::size_t{1} << 20;
constexpr std::size_t kMediumSegmentBytes = std::size_t{8} << 20;  // for requests of 1 to 2 MiB
constexpr std::size_t kLargeSegmentBytes = std::size_t{20} << 20;
constexpr std::size_t kMinExactSegmentBytes = std::size_t{10} << 20;  // from here, just enough

constexpr Profile kDeviceProfile{.kind = MemoryKind::device, .advice = {}};
// Beyond the budget, managed memory stays on the host and the device uses it in place.
constexpr Profile kSpillProfile{
    .kind = MemoryKind::managed,
    .advice = {.placement = Placement::host, .accessed_by_device = true, .read_mostly = false}};

std::size_t segment_bytes_for(Tier tier, std::size_t bytes) {
  if (tier == Tier::small)
    return bytes <= kSmallRequestBytes ? kSmallSegmentBytes : kMediumSegmentBytes;
  return bytes < kMinExactSegmentBytes ? kLargeSegmentBytes : round_up(bytes, kPageBytes);
}

bool takes_advice(MemoryKind kind) {
  return kind == MemoryKind::managed || kind == MemoryKind::system;
}

bool resides_on_device(const Profile& profile) {
  switch (profile.kind) {
    case MemoryKind::device:
      return true;
    case MemoryKind::managed:
    case MemoryKind::system:
      return profile.advice.placement != Placement::host;
    case MemoryKind::pinned:
      return false;
  }
  return false;
}

std::string format_bytes(std::size_t bytes) {
  constexpr std::array<const char*, 4> kUnits = {"B", "KiB", "MiB", "GiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text.data();
}

}  // namespace

DeviceAllocator::DeviceAllocator(int device, const Config& config, SegmentSource& source,
                                 Driver& driver, ManagedLimit& managed_limit)
    : device_(device),
      config_(config),
      source_(source),
      driver_(driver),
      managed_limit_(managed_limit),
      budget_bytes_(config.device_budget_bytes) {
  const std::uint8_t device_profile = profile_number(kDeviceProfile);
  const std::uint8_t device_small = route_number({device_profile, Tier::small});
  const std::uint8_t device_large = route_number({device_profile, Tier::large});
  for (std::size_t i = 0; i < kClasses; ++i) {
    const ClassSetting& setting = config_.classes[i];
    // Memory without advice is the same for every policy: one heap serves all classes.
    const std::uint8_t profile = profile_number(
        {setting.kind, takes_advice(setting.kind) ? setting.advice : Advice{}});
    // Every class has its own small route, even if another class has the same profile.
    routes_.push_back({profile, Tier::small});
    class_routes_[i] = {device_small, device_large,
                        static_cast<std::uint8_t>(routes_.size() - 1),
                        route_number({profile, Tier::large})};
  }
  // A separate profile, even if a policy maps a class in the same way: memory that was spilled
  // because of the budget is counted separately.
  profiles_.push_back(kSpillProfile);
  spill_profile_ = static_cast<std::uint8_t>(profiles_.size() - 1);
  routes_.push_back({spill_profile_, Tier::small});
  spill_small_ = static_cast<std::uint8_t>(routes_.size() - 1);
  routes_.push_back({spill_profile_, Tier::large});
  spill_large_ = static_cast<std::uint8_t>(routes_.size() - 1);
}

DeviceAllocator::~DeviceAllocator() {
  synchronize_events();
  std::vector<Segment*> all;
  for (auto& [address, segment] : segments_) all.push_back(&segment);
  announce_release(all);
  for (const Segment* segment : all) give_back(*segment);
}

std::uint8_t DeviceAllocator::profile_number(Profile profile) {
  for (std::size_t i = 0; i < profiles_.size(); ++i)
    if (profiles_[i] == profile) return static_cast<std::uint8_t>(i);
  profiles_.push_back(profile);
  return static_cast<std::uint8_t>(profiles_.size() - 1);
}

std::uint8_t DeviceAllocator::route_number(Route route) {
  for (std::size_t i = 0; i < routes_.size(); ++i)
    if (routes_[i].tier == route.tier && routes_[i].profile == route.profile)
      return static_cast<std::uint8_t>(i);
  routes_.push_back(route);
  return static_cast<std::uint8_t>(routes_.size() - 1);
}

std::uint8_t DeviceAllocator::route_for(TensorClass tensor_class, std::size_t bytes) const {
  const auto number = static_cast<std::size_t>(tensor_class);
  const ClassRoutes& routes = class_routes_[number];
  const bool too_small = bytes < config_.classes[number].min_bytes;
  if (bytes >= kPageBytes) return too_small ? routes.device_large : routes.large;
  return too_small ? routes.device_small : routes.small;
}

void* DeviceAllocator::allocate(std::size_t bytes, StreamId stream, TensorClass tensor_class) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  Shortage shortage = Shortage::source;
  void* address = serve(bytes, stream, tensor_class, shortage);
  if (address == nullptr) throw_out_of_memory(bytes, tensor_class, shortage);
  return address;
}

void* DeviceAllocator::try_allocate(std::size_t bytes, StreamId stream, TensorClass tensor_class) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  Shortage shortage = Shortage::source;
  return serve(bytes, stream, tensor_class, shortage);
}

void* DeviceAllocator::serve(std::size_t bytes, StreamId stream, TensorClass tensor_class,
                             Shortage& shortage) {
  if (bytes > SIZE_MAX / 2) return nullptr;  // a negative size, cast: rounding it up would wrap
  if (!pending_events_.empty() || !deferred_.empty()) process_events();
  const std::uint8_t route = route_for(tensor_class, bytes);
  const std::size_t block_bytes = round_up(bytes, step_bytes(routes_[route].tier));
  Pool* pool = active_pools_.empty() ? nullptr : pool_for(stream);
  Block* block = take_cached(heap_for(route, stream, pool), block_bytes);
  if (block == nullptr) block = grow(tensor_class, route, stream, pool, block_bytes, shortage);
  return block == nullptr ? nullptr : hand_out(block, bytes, tensor_class);
}

Pool* DeviceAllocator::pool_for(StreamId stream) {
  for (auto active = active_pools_.rbegin(); active != active_pools_.rend(); ++active)
    if (active->filter(stream)) return pools_.at(active->id).get();
  return nullptr;
}

Heap& DeviceAllocator::heap_for(std::uint8_t route, StreamId stream, Pool* pool) {
  StreamHeaps& heaps = (pool == nullptr ? heaps_ : pool->heaps)[stream];
  if (heaps.empty()) heaps.resize(routes_.size());
  std::unique_ptr<Heap>& heap = heaps[route];
  if (heap == nullptr)
    heap = std::make_unique<Heap>(routes_[route].profile, routes_[route].tier, stream, pool);
  return *heap;
}

Block* DeviceAllocator::take_cached(Heap& heap, std::size_t bytes) {
  Block* block = heap.index.best_fit(bytes);
  if (block == nullptr) return nullptr;
  uncache(block);
  cut(block, bytes);
  return block;
}

Block* DeviceAllocator::grow(TensorClass tensor_class, std::uint8_t route, StreamId stream,
                             Pool* pool, std::size_t bytes, Shortage& shortage) {
  Heap& heap = heap_for(route, stream, pool);
  const Profile& profile = profiles_[heap.profile];
  const bool may_spill =
      config_.classes[static_cast<std::size_t>(tensor_class)].kind == MemoryKind::managed;
  const bool may_release = active_pools_.empty();  // freeing a segment would break a capture
  const auto spill_or_fail = [&]() -> Block* {
    shortage = Shortage::device_budget;
    return may_spill ? spill(heap.tier, stream, pool, bytes, shortage) : nullptr;
  };

  const std::size_t least_bytes = least_segment_bytes(bytes);
  Block* block = nullptr;
  if (!over_budget(profile, least_bytes)) {
    block = new_segment(heap, bytes, shortage);
  } else {
    // Use cached host memory before freeing the cache: a steady state must not free and allocate
    // segments in every step.
    if (may_spill)
      block = take_cached(
          heap_for(heap.tier == Tier::small ? spill_small_ : spill_large_, stream, pool), bytes);
    if (block != nullptr) return block;
    if (may_release) release_cached_segments();
    block = over_budget(profile, least_bytes) ? spill_or_fail()
                                              : new_segment(heap, bytes, shortage);
  }
  if (block != nullptr || !may_release) return block;

  ++stats_.num_alloc_retries;
  synchronize_events();
  block = take_cached(heap, bytes);
  if (block != nullptr) return block;
  release_cached_segments();
  if (over_budget(profile, least_bytes)) return spill_or_fail();
  return new_segment(heap, bytes, shortage);
}

Block* DeviceAllocator::spill(Tier tier, StreamId stream, Pool* pool, std::size_t bytes,
                              Shortage& shortage) {
  Heap& heap = heap_for(tier == Tier::small ? spill_small_ : spill_large_, stream, pool);
  if (Block* block = take_cached(heap, bytes)) return block;
  return new_segment(heap, bytes, shortage);
}

bool DeviceAllocator::over_budget(const Profile& profile, std::size_t bytes) const {
  return budget_bytes_ != 0 && resides_on_device(profile) &&
         resident_bytes_ + bytes > budget_bytes_;
}

// Counts `bytes` of a kind against every limit, or returns the limit that they would exceed.
bool DeviceAllocator::reserve(MemoryKind kind, std::size_t bytes, Shortage& shortage) {
  if (fraction_ < 1.0) {
    const auto limit = static_cast<std::size_t>(
        fraction_ * static_cast<double>(driver_.memory(device_).total_bytes));
    if (static_cast<std::size_t>(stats_.reserved_bytes.all.current) + bytes > limit) {
      shortage = Shortage::memory_fraction;
      return false;
    }
  }
  if (kind == MemoryKind::managed && !managed_limit_.take(bytes)) {
    shortage = Shortage::managed_limit;
    return false;
  }
  return true;
}

// Segments that blocks are cut from are whole pages, however small the request.
std::size_t DeviceAllocator::least_segment_bytes(std::size_t bytes) const {
  return config_.caching ? round_up(bytes, kPageBytes) : bytes;
}

Block* DeviceAllocator::new_segment(Heap& heap, std::size_t bytes, Shortage& shortage) {
  const Profile& profile = profiles_[heap.profile];
  const std::size_t least_bytes = least_segment_bytes(bytes);
  std::size_t segment_bytes =
      config_.caching ? segment_bytes_for(heap.tier, bytes) : least_bytes;
  if (over_budget(profile, segment_bytes)) segment_bytes = least_bytes;

  const auto give_back_limit = [&](std::size_t bytes_taken) {
    if (profile.kind == MemoryKind::managed) managed_limit_.give_back(bytes_taken);
  };
  const auto take = [&](std::size_t raw_bytes) -> void* {
    if (!reserve(profile.kind, raw_bytes, shortage)) return nullptr;
    void* raw = nullptr;
    try {
      raw = source_.allocate(profile.kind, device_, raw_bytes);
    } catch (...) {
      give_back_limit(raw_bytes);
      throw;
    }
    if (raw == nullptr) {
      shortage = Shortage::source;
      give_back_limit(raw_bytes);
    }
    return raw;
  };
  // Sources guarantee 256 bytes.
  const std::size_t alignment = config_.caching ? kPageBytes : step_bytes(heap.tier);
  std::size_t raw_bytes = 0;
  const auto take_aligned = [&](std::size_t wanted_bytes) -> void* {
    raw_bytes = wanted_bytes;
    void* raw = take(raw_bytes);
    if (raw == nullptr || reinterpret_cast<std::uintptr_t>(raw) % alignment == 0) return raw;
    source_.deallocate(profile.kind, device_, raw, raw_bytes);
    give_back_limit(raw_bytes);
    raw_bytes = wanted_bytes + alignment;
    return take(raw_bytes);
  };

  void* raw = take_aligned(segment_bytes);
  if (raw == nullptr && segment_bytes > least_bytes) {  // allocate the request alone
    segment_bytes = least_bytes;
    raw = take_aligned(segment_bytes);
  }
  if (raw == nullptr) return nullptr;

  const std::uintptr_t address = round_up(reinterpret_cast<std::uintptr_t>(raw), alignment);
  Segment& segment = segments_[address];
  segment = {.address = address,
             .bytes = segment_bytes,
             .raw = raw,
             .raw_bytes = raw_bytes,
             .heap = &heap};
  Block& block = blocks_[address];
  block.address = address;
  block.bytes = segment_bytes;
  block.segment = &segment;
  block.advice = heap.profile;
  segment.first = &block;

  const Range range{address, segment_bytes};
  bool taken = true;
  if (takes_advice(profile.kind) && profile.advice != Advice{})
    taken = driver_.advise(device_, range, profile.advice);
  if (profile.kind == MemoryKind::managed && profile.advice.placement == Placement::device)
    taken = driver_.populate(device_, range) && taken;
  if (!taken) ++stats_.num_failed_hints;

  ++stats_.num_device_alloc;
  stats_.segment.increase(heap.tier, 1);
  stats_.reserved_bytes.increase(heap.tier, segment_bytes);
  KindStats& kind = kind_stats_[static_cast<std::size_t>(profile.kind)];
  kind.reserved_bytes += segment_bytes;
  if (heap.profile == spill_profile_) kind.spilled_bytes += segment_bytes;
  if (resides_on_device(profile)) resident_bytes_ += segment_bytes;
  if (heap.pool != nullptr) {
    ++heap.pool->segments;
    heap.pool->reserved_bytes += segment_bytes;
  }
  cut(&block, bytes);
  return &block;
}

// Leaves `bytes` in the block, and the rest in a cached block after it.
void DeviceAllocator::cut(Block* block, std::size_t bytes) {
  if (block->bytes == bytes) return;
  const std::uintptr_t address = block->address + bytes;
  Block& rest = blocks_[address];
  rest.address = address;
  rest.bytes = block->bytes - bytes;
  rest.segment = block->segment;
  rest.advice = block->advice;
  rest.previous = block;
  rest.next = block->next;
  if (rest.next != nullptr) rest.next->previous = &rest;
  block->next = &rest;
  block->bytes = bytes;
  cache(&rest);
}

void DeviceAllocator::cache(Block* block) {
  Heap& heap = *block->segment->heap;
  block->state = BlockState::cached;
  heap.index.insert(block);
  if (block->is_split()) {
    stats_.inactive_split.increase(heap.tier, 1);
    stats_.inactive_split_bytes.increase(heap.tier, block->bytes);
  }
}

void DeviceAllocator::uncache(Block* block) {
  Heap& heap = *block->segment->heap;
  heap.index.remove(block);
  if (block->is_split()) {
    stats_.inactive_split.decrease(heap.tier, 1);
    stats_.inactive_split_bytes.decrease(heap.tier, block->bytes);
  }
}

// Merges two adjacent blocks that are in no index.
Block* DeviceAllocator::merge(Block* left, Block* right) {
  if (left->advice != right->advice) left->advice = kMixedAdvice;
  left->bytes += right->bytes;
  left->next = right->next;
  if (left->next != nullptr) left->next->previous = left;
  blocks_.erase(right->address);
  return left;
}

void* DeviceAllocator::hand_out(Block* block, std::size_t requested_bytes,
                                TensorClass tensor_class) {
  const Heap& heap = *block->segment->heap;
  block->state = BlockState::live;
  block->requested_bytes = requested_bytes;
  block->tensor_class = tensor_class;
  if (block->advice != heap.profile) apply_advice(block, heap.profile);
  stats_.allocation.increase(heap.tier, 1);
  stats_.allocated_bytes.increase(heap.tier, block->bytes);
  peak_bytes_ = std::max(peak_bytes_, stats_.allocated_bytes.all.current);
  stats_.highest_bytes = std::max(stats_.highest_bytes, stats_.allocated_bytes.all.current);
  stats_.active.increase(heap.tier, 1);
  stats_.active_bytes.increase(heap.tier, block->bytes);
  stats_.requested_bytes.increase(heap.tier, requested_bytes);
  if (heap.pool != nullptr) heap.pool->allocated_bytes += block->bytes;
  count_class(*block, true);
  return reinterpret_cast<void*>(block->address);
}

void DeviceAllocator::apply_advice(Block* block, std::uint8_t profile) {
  const Range range{block->address, block->bytes};
  if (!driver_.advise(device_, range, profiles_[profile].advice)) ++stats_.num_failed_hints;
  block->advice = profile;
}

void DeviceAllocator::count_class(const Block& block, bool born) {
  ClassStats& stats = stats_.by_class[static_cast<std::size_t>(block.tensor_class)];
  if (born) {
    stats.allocation.increase(1);
    stats.allocated_bytes.increase(block.bytes);
    stats.requested_bytes.increase(block.requested_bytes);
  } else {
    stats.allocation.decrease(1);
    stats.allocated_bytes.decrease(block.bytes);
    stats.requested_bytes.decrease(block.requested_bytes);
  }
}

Block* DeviceAllocator::live_block(std::uintptr_t address) {
  const auto found = blocks_.find(address);
  return found == blocks_.end() || found->second.state != BlockState::live ? nullptr
                                                                           : &found->second;
}

bool DeviceAllocator::free(std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  Block* block = live_block(address);
  if (block == nullptr) return false;
  const Heap& heap = *block->segment->heap;
  stats_.allocation.decrease(heap.tier, 1);
  stats_.allocated_bytes.decrease(heap.tier, block->bytes);
  stats_.requested_bytes.decrease(heap.tier, block->requested_bytes);
  if (heap.pool != nullptr) heap.pool->allocated_bytes -= block->bytes;
  count_class(*block, false);
  if (block->other_streams.empty())
    settle(block);
  else
    wait_for_streams(block);
  return true;
}

// No stream uses the block any more: it goes back to its heap.
void DeviceAllocator::settle(Block* block) {
  const Heap& heap = *block->segment->heap;
  stats_.active.decrease(heap.tier, 1);
  stats_.active_bytes.decrease(heap.tier, block->bytes);
  if (unspilled(*block)) {  // the next allocation in its place is spilled again
    count_spilled(static_cast<std::ptrdiff_t>(block->bytes));
    apply_advice(block, spill_profile_);
  }
  if (Block* next = block->next; next != nullptr && next->state == BlockState::cached) {
    uncache(next);
    merge(block, next);
  }
  if (Block* previous = block->previous;
      previous != nullptr && previous->state == BlockState::cached) {
    uncache(previous);
    block = merge(previous, block);
  }
  cache(block);
  // A graph may write to its pool's blocks at every replay, freed or not.
  const bool pool_in_use = heap.pool != nullptr && heap.pool->users > 0;
  if (!config_.caching && !block->is_split() && !pool_in_use && active_pools_.empty())
    release_segments({block->segment});
}

bool DeviceAllocator::record_stream(std::uintptr_t address, StreamId stream) {
  const std::lock_guard lock(mutex_);
  Block* block = live_block(address);
  if (block == nullptr) return false;
  std::vector<StreamId>& streams = block->other_streams;
  if (stream != block->segment->heap->stream &&
      std::find(streams.begin(), streams.end(), stream) == streams.end())
    streams.push_back(stream);
  return true;
}

void DeviceAllocator::wait_for_streams(Block* block) {
  block->state = BlockState::pending;
  if (!active_pools_.empty()) {
    bool capturing = driver_.capturing(block->segment->heap->stream);
    for (const StreamId stream : block->other_streams)
      capturing = capturing || driver_.capturing(stream);
    if (capturing) {  // an event recorded now would be a node of the graph, never to be queried
      deferred_.push_back(block);
      return;
    }
  }
  for (const StreamId stream : std::exchange(block->other_streams, {})) {
    const EventId event = driver_.record(device_, stream);
    ++block->pending_events;
    // No event: the driver or the stream is gone, and the end of the work is unknown, so the block
    // is never reused.
    if (event != 0) pending_events_[stream].push_back({event, block});
  }
}

void DeviceAllocator::process_events() {
  if (active_pools_.empty()) finish_deferred();
  for (auto queue = pending_events_.begin(); queue != pending_events_.end();) {
    std::deque<PendingEvent>& events = queue->second;
    while (!events.empty() && driver_.finished(events.front().event)) {
      Block* block = events.front().block;
      events.pop_front();
      if (--block->pending_events == 0) settle(block);
    }
    queue = events.empty() ? pending_events_.erase(queue) : std::next(queue);
  }
}

void DeviceAllocator::synchronize_events() {
  if (active_pools_.empty()) finish_deferred();
  if (pending_events_.empty()) return;
  ++stats_.num_sync_all_streams;
  for (auto& [stream, events] : std::exchange(pending_events_, {}))
    for (const PendingEvent& pending : events) {
      driver_.wait(pending.event);
      if (--pending.block->pending_events == 0) settle(pending.block);
    }
}

void DeviceAllocator::finish_deferred() {
  for (Block* block : std::exchange(deferred_, {})) wait_for_streams(block);
}

bool DeviceAllocator::retag(std::uintptr_t address, TensorClass tensor_class) {
  const std::lock_guard lock(mutex_);
  Block* block = live_block(address);
  if (block == nullptr) return false;
  if (block->tensor_class == tensor_class) return true;
  count_class(*block, false);
  block->tensor_class = tensor_class;
  count_class(*block, true);

  // A spilled block stays on the host because of the budget. A block that shares pages stays too.
  const Heap& heap = *block->segment->heap;
  const std::uint8_t profile = profile_of_class(*block);
  if (heap.tier == Tier::large && block->advice != spill_profile_ &&
      profiles_[profile].kind == profiles_[heap.profile].kind &&
      takes_advice(profiles_[profile].kind) && block->advice != profile)
    apply_advice(block, profile);
  return true;
}

std::uint8_t DeviceAllocator::profile_of_class(const Block& block) const {
  return routes_[class_routes_[static_cast<std::size_t>(block.tensor_class)].large].profile;
}

std::vector<LiveBlock> DeviceAllocator::unspill() {
  const std::lock_guard lock(mutex_);
  std::vector<LiveBlock> moved;
  for (auto& [address, segment] : segments_) {
    if (segment.heap->profile != spill_profile_ || segment.heap->tier != Tier::large) continue;
    for (Block* block = segment.first; block != nullptr; block = block->next) {
      const std::uint8_t profile = profile_of_class(*block);
      if (block->state != BlockState::live || block->advice != spill_profile_ ||
          profiles_[profile].kind != MemoryKind::managed || !resides_on_device(profiles_[profile]))
        continue;
      apply_advice(block, profile);
      count_spilled(-static_cast<std::ptrdiff_t>(block->bytes));
      moved.push_back(live(*block));
    }
  }
  return moved;
}

bool DeviceAllocator::unspilled(const Block& block) const {
  return block.segment->heap->profile == spill_profile_ && block.advice != spill_profile_;
}

// Spilled bytes are not on the device. Unsigned arithmetic wraps around.
void DeviceAllocator::count_spilled(std::ptrdiff_t bytes) {
  const auto change = static_cast<std::size_t>(bytes);
  kind_stats_[static_cast<std::size_t>(MemoryKind::managed)].spilled_bytes += change;
  resident_bytes_ -= change;
}

void DeviceAllocator::empty_cache() {
  const std::lock_guard lock(mutex_);
  if (!active_pools_.empty()) return;  // freeing a segment would break a capture
  synchronize_events();
  release_cached_segments();
}

// Gives back every segment that is one cached block, except those of pools in use.
void DeviceAllocator::release_cached_segments() {
  std::vector<Segment*> cached;
  for (auto& [address, segment] : segments_) {
    const Pool* pool = segment.heap->pool;
    const bool pool_in_use = pool != nullptr && pool->users > 0;
    if (segment.first->state == BlockState::cached && !segment.first->is_split() && !pool_in_use)
      cached.push_back(&segment);
  }
  release_segments(cached);
  std::erase_if(pools_, [](const auto& entry) {
    return entry.second->users == 0 && entry.second->segments == 0;
  });
}

void DeviceAllocator::release_segments(const std::vector<Segment*>& segments) {
  announce_release(segments);
  for (const Segment* released : segments) {
    const Segment& segment = *released;
    Heap& heap = *segment.heap;
    const Profile& profile = profiles_[heap.profile];
    uncache(segment.first);
    give_back(segment);
    ++stats_.num_device_free;
    stats_.segment.decrease(heap.tier, 1);
    stats_.reserved_bytes.decrease(heap.tier, segment.bytes);
    KindStats& kind = kind_stats_[static_cast<std::size_t>(profile.kind)];
    kind.reserved_bytes -= segment.bytes;
    if (heap.profile == spill_profile_) kind.spilled_bytes -= segment.bytes;
    if (resides_on_device(profile)) resident_bytes_ -= segment.bytes;
    if (heap.pool != nullptr) {
      --heap.pool->segments;
      heap.pool->reserved_bytes -= segment.bytes;
    }
    blocks_.erase(segment.first->address);
    segments_.erase(segment.address);
  }
}

// Reports all segments at once, so that the listener waits only for the longest call. Device memory
// is never moved and need not be reported; pinned memory may be the target of copies.
void DeviceAllocator::announce_release(const std::vector<Segment*>& segments) const {
  if (release_listener_ == nullptr) return;
  std::vector<Range> ranges;
  for (const Segment* segment : segments)
    if (profiles_[segment->heap->profile].kind != MemoryKind::device)
      ranges.push_back({segment->address, segment->bytes});
  if (!ranges.empty()) release_listener_->before_release(ranges);
}

void DeviceAllocator::give_back(const Segment& segment) {
  const MemoryKind kind = profiles_[segment.heap->profile].kind;
  source_.deallocate(kind, device_, segment.raw, segment.raw_bytes);
  if (kind == MemoryKind::managed) managed_limit_.give_back(segment.raw_bytes);
}

void DeviceAllocator::set_device_budget(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  budget_bytes_ = bytes;
}

void DeviceAllocator::set_release_listener(std::shared_ptr<ReleaseListener> listener) {
  const std::lock_guard lock(mutex_);
  // The old listener is destroyed after the lock is released: it may have to end threads.
  release_listener_.swap(listener);
}

void DeviceAllocator::set_memory_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  fraction_ = fraction;
}

double DeviceAllocator::memory_fraction() const {
  const std::lock_guard lock(mutex_);
  return fraction_;
}

std::optional<Range> DeviceAllocator::base_allocation(std::uintptr_t address) const {
  const std::lock_guard lock(mutex_);
  auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return std::nullopt;
  const Segment& segment = std::prev(after)->second;
  if (address >= segment.address + segment.bytes) return std::nullopt;
  return Range{segment.address, segment.bytes};
}

void DeviceAllocator::begin_pool(PoolId id, StreamFilter filter) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Pool>& pool = pools_[id];
  if (pool == nullptr) {
    pool = std::make_unique<Pool>();
    pool->id = id;
  }
  ++pool->users;
  active_pools_.push_back({id, std::move(filter)});
}

void DeviceAllocator::end_pool(PoolId id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(active_pools_, [&](const ActivePool& active) { return active.id == id; });
  if (active_pools_.empty()) finish_deferred();
}

void DeviceAllocator::release_pool(PoolId id) {
  const std::lock_guard lock(mutex_);
  const auto found = pools_.find(id);
  if (found == pools_.end() || found->second->users == 0) return;
  Pool& pool = *found->second;
  if (--pool.users == 0 && pool.segments == 0 && active_pools_.empty()) pools_.erase(found);
}

DeviceStats DeviceAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void DeviceAllocator::reset_peak_stats() {
  const std::lock_guard lock(mutex_);
  stats_.reset_peak();
}

std::size_t DeviceAllocator::take_peak_bytes() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::exchange(peak_bytes_, stats_.allocated_bytes.all.current));
}

void DeviceAllocator::reset_accumulated_stats() {
  const std::lock_guard lock(mutex_);
  stats_.reset_accumulated();
}

std::vector<PoolStats> DeviceAllocator::pool_stats() const {
  const std::lock_guard lock(mutex_);
  std::vector<PoolStats> all;
  for (const auto& [id, pool] : pools_)
    all.push_back({id, pool->reserved_bytes, pool->allocated_bytes, pool->users > 0});
  return all;
}

std::array<KindStats, kKinds> DeviceAllocator::kind_stats() const {
  const std::lock_guard lock(mutex_);
  return kind_stats_;
}

std::vector<SegmentSnapshot> DeviceAllocator::segments() const {
  const std::lock_guard lock(mutex_);
  std::vector<SegmentSnapshot> all;
  for (const auto& [address, segment] : segments_) {
    const Heap& heap = *segment.heap;
    SegmentSnapshot snapshot{.address = address,
                             .bytes = segment.bytes,
                             .stream = heap.stream,
                             .tier = heap.tier,
                             .kind = profiles_[heap.profile].kind,
                             .pool = heap.pool == nullptr ? PoolId{0, 0} : heap.pool->id,
                             .blocks = {}};
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      snapshot.blocks.push_back({block->address, block->bytes, block->requested_bytes,
                                 block->state, block->tensor_class});
    all.push_back(std::move(snapshot));
  }
  return all;
}

void DeviceAllocator::append_live_blocks(std::vector<LiveBlock>& to) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [address, segment] : segments_)
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      if (block->state == BlockState::live) to.push_back(live(*block));
}

LiveBlock DeviceAllocator::live(const Block& block) const {
  return {block.address,      block.requested_bytes, block.bytes,
          block.tensor_class, device_,               profiles_[block.segment->heap->profile].kind};
}

void DeviceAllocator::throw_out_of_memory(std::size_t bytes, TensorClass tensor_class,
                                          Shortage shortage) {
  ++stats_.num_ooms;
  const MemoryInfo memory = driver_.memory(device_);
  const auto held = [](const Stat& stat) {
    return format_bytes(static_cast<std::size_t>(stat.current));
  };
  std::string text = "CUDA out of memory. Tried to allocate " + format_bytes(bytes) + " for " +
                     kClassNames[static_cast<std::size_t>(tensor_class)] + " on GPU " +
                     std::to_string(device_) + ", which has " + format_bytes(memory.total_bytes) +
                     " of which " + format_bytes(memory.free_bytes) + " is free. umem holds " +
                     held(stats_.reserved_bytes.all) + ", " + held(stats_.allocated_bytes.all) +
                     " of it in tensors. ";
  switch (shortage) {
    case Shortage::source:
      text += "The memory resource has no more: use a smaller batch, or a policy that places "
              "less on the device.";
      break;
    case Shortage::managed_limit:
      text += "The cap on managed memory, " + format_bytes(managed_limit_.limit_bytes()) +
              ", holds " + format_bytes(managed_limit_.held_bytes()) +
              " already: raise UMEM_MANAGED_LIMIT or the policy's limits.managed_bytes, as far as "
              "the machine's memory allows.";
      break;
    case Shortage::device_budget:
      text += "The device budget, " + format_bytes(budget_bytes_) +
              ", is spent, and this class's memory cannot leave the device: raise device_budget, "
              "or give the class kind: managed.";
      break;
    case Shortage::memory_fraction:
      text += "set_per_process_memory_fraction(" + std::to_string(fraction_) +
              ") allows no more: raise it.";
      break;
  }
  throw OutOfMemory(text);
}

}  // namespace umem
