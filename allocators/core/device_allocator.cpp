// Note [Graphs]
//
// Allocations during a capture go to the private pool that torch names, whatever stream is
// captured. Memory that they free serves that pool only, until the graph is gone. Segments needed
// during a capture are allocated with the thread's capture mode relaxed, as in torch. A block
// freed during a capture while another stream uses it waits for the end of the capture: an event
// recorded inside would become a node of the graph.
//
// Note [Poison]
//
// Every byte of a new block is overwritten on its stream, before its owner gets it. A freed block
// is, on its stream, at that stream's next request, whatever its size. Not earlier: a program may
// free a tensor that another stream reads, and have the tensor's stream wait for that one before
// it asks for memory. With `record_stream`, that is behind the other stream's work, too. What
// another stream borrows is overwritten when that one gets it. Blocks of graphs' private pools are
// left alone, because a graph uses them at every replay, freed or not; nothing is added to a graph
// that the program did not ask for.
#include "core/device_allocator.hpp"

#include <algorithm>
#include <cstdio>
#include <tuple>
#include <utility>

namespace umem {

DeviceAllocator::DeviceAllocator(int device, const Config& config, SegmentSource& source,
                                 Driver& driver, SharedLimits& limits)
    : device_(device),
      config_(config),
      source_(source),
      driver_(driver),
      limits_(limits),
      routes_(config.classes),
      budget_(config.device_budget_bytes, stats_.budget_bytes, limits) {}

DeviceAllocator::~DeviceAllocator() {
  end_locking_ahead();
  const BothLocks locks(locks_);
  synchronize_events();
  for (const auto& [stream, heaps] : heaps_)
    for (const std::unique_ptr<Heap>& heap : heaps)
      if (heap != nullptr)
        mapped_.wait_for_uses(*heap);
  mapped_.wait_for_earlier_uses();
  LeavingMemory leaving;  // but for the runs of expandable segments, whose heaps end them
  for (const auto& [address, segment] : segments_)
    if (!segment.is_expandable) append_piece(segment, leaving);
  give_back(leaving);
}

std::size_t DeviceAllocator::set_device_room(TensorClass tensor_class, std::size_t bytes) {
  const std::lock_guard lock(locks_.books);
  return routes_.set_device_room(tensor_class, bytes);
}

void* DeviceAllocator::allocate(std::size_t bytes, StreamId stream, TensorClass tensor_class) {
  if (bytes == 0) return nullptr;
  Shortage shortage;
  void* address = serve({bytes, stream, tensor_class}, shortage);
  if (address == nullptr) throw_out_of_memory(bytes, tensor_class, shortage);
  return address;
}

void* DeviceAllocator::try_allocate(std::size_t bytes, StreamId stream, TensorClass tensor_class) {
  if (bytes == 0) return nullptr;
  Shortage shortage;
  return serve({bytes, stream, tensor_class}, shortage);
}

void* DeviceAllocator::serve(Request request, Shortage& shortage) {
  if (request.bytes > SIZE_MAX / 2) return nullptr;  // a negative size, cast: rounding would wrap
  Heap* heap = nullptr;
  std::size_t bytes = 0;
  const auto choose_heap = [&] {
    check_not_paused();
    std::tie(heap, bytes) = heap_and_bytes_for(request);
  };
  {
    std::unique_lock lock(locks_.books);
    if (!cache_closed_) {
      choose_heap();
      if (Block* best = find_cached(*heap, bytes);
          best != nullptr && best->advice == heap->profile) {
        ++stats_.served[static_cast<std::size_t>(Rung::cached)];
        return hand_out(take(*heap, best, bytes), request.bytes, request.tensor_class);
      }
      wait_for_locking(lock, *heap, bytes);
    }
  }
  // The driver is needed, for advice or for memory, unless the cache was filled in the meantime.
  const BothLocks locks(locks_);
  choose_heap();
  Attempt attempt{*heap, request.tensor_class, bytes, shortage};
  Block* block = climb(attempt);
  return block == nullptr ? nullptr : hand_out(block, request.bytes, request.tensor_class);
}

std::pair<Heap*, std::size_t> DeviceAllocator::heap_and_bytes_for(Request& request) {
  if (uses_.has_pending()) uses_.take_finished([this](Block* block) { retire(block); });
  if (!freed_.empty()) poison_freed(request.stream);
  if (!request.in_room)
    request.in_room = routes_.take_device_room(request.tensor_class, request.bytes);
  const std::uint8_t route = routes_.route_for(
      *request.in_room ? TensorClass::other : request.tensor_class, request.bytes);
  Pool* pool = active_pools_.empty() ? nullptr : pool_for(request.stream);
  return {&heap_for(route, request.stream, pool),
          round_up(request.bytes, step_bytes(routes_[route].tier))};
}

Pool* DeviceAllocator::pool_for(StreamId stream) {
  for (auto active = active_pools_.rbegin(); active != active_pools_.rend(); ++active)
    if (active->filter(stream)) return pools_.at(active->id).get();
  return nullptr;
}

Heap& DeviceAllocator::heap_for(std::uint8_t route, StreamId stream, Pool* pool) {
  StreamHeaps& heaps = (pool == nullptr ? heaps_ : pool->heaps)[stream];
  if (heaps.empty()) {
    heaps.resize(routes_.count());
    if (pool == nullptr) uses_.add(stream);
  }
  std::unique_ptr<Heap>& heap = heaps[route];
  if (heap == nullptr)
    heap = std::make_unique<Heap>(routes_[route], routes_.profile(routes_[route].profile), stream,
                                  pool);
  return *heap;
}

Block* DeviceAllocator::find_cached(const Heap& heap, std::size_t bytes) const {
  Block* block = free_alias(heap, bytes);
  if (block == nullptr) block = free_borrowed(heap, bytes);
  return block != nullptr ? block : heap.index.best_fit(bytes);
}

Block* DeviceAllocator::take_cached(Heap& heap, std::size_t bytes) {
  Block* block = find_cached(heap, bytes);
  return block == nullptr ? nullptr : take(heap, block, bytes);
}

Block* DeviceAllocator::take(Heap& heap, Block* block, std::size_t bytes) {
  if (block->segment->is_alias) {
    std::erase(heap.free_aliases, block);
    return block;
  }
  if (block->borrower != nullptr) {
    std::erase(heap.free_borrowed, block);
    count_active(*block, false);
    return block;
  }
  segments_.uncache(block);
  segments_.cut(block, bytes);
  return block;
}

void* DeviceAllocator::hand_out(Block* block, std::size_t requested_bytes,
                                TensorClass tensor_class) {
  const Heap& heap = *block->segment->heap;
  block->state = BlockState::live;
  block->requested_bytes = requested_bytes;
  block->tensor_class = tensor_class;
  count_live(*block, true);
  count_active(*block, true);
  peak_bytes_ = std::max(peak_bytes_, stats_.allocated_bytes.all.current);
  stats_.highest_bytes = std::max(stats_.highest_bytes, stats_.allocated_bytes.all.current);
  if (block->advice != heap.profile) apply_advice(block, heap.profile);
  poison(*block);
  return reinterpret_cast<void*>(block->address);
}

// Another thread may free the block meanwhile.
void DeviceAllocator::apply_advice(Block* block, std::uint8_t profile) {
  block->advice = profile;
  const Segment& segment = *block->segment;
  const Range range{block->address, block->bytes};
  note_hint(locks_.unlocked([&] { return advise(segment, range, profile); }), has_warned_of_advice_,
            "advice");
}

// What lies beyond the segment's room on the device keeps its place on the host.
bool DeviceAllocator::advise(const Segment& segment, Range range, std::uint8_t profile) {
  if (!config_.advises) return false;
  const Advice& advice = routes_.profile(profile).advice;
  const std::uintptr_t end = range.address + range.bytes;
  std::uintptr_t border = end;
  if (routes_.profile(profile).kind == MemoryKind::system && advice.placement == Placement::device)
    border = std::clamp(segment.address + segment.device_bytes, range.address, end);
  const Advice beyond{.placement = Placement::host,
                      .accessed_by_device = true,
                      .read_mostly = advice.read_mostly};
  bool taken = true;
  if (border != range.address)
    taken = driver_.advise(device_, {range.address, border - range.address}, advice);
  if (border != end) taken = driver_.advise(device_, {border, end - border}, beyond) && taken;
  return taken;
}

void DeviceAllocator::note_hint(bool taken, bool& has_warned, const char* what) {
  if (taken) return;
  ++stats_.num_failed_hints;
  if (!std::exchange(has_warned, true))
    std::fprintf(stderr,
                 "umem: GPU %d takes no %s: memory is used without, where the driver puts it. "
                 "Further refusals are only counted.\n",
                 device_, what);
}

void DeviceAllocator::count_live(const Block& block, bool born) {
  const Heap& heap = *block.segment->heap;
  stats_.allocation.change(heap.tier, 1, born);
  stats_.allocated_bytes.change(heap.tier, block.bytes, born);
  stats_.requested_bytes.change(heap.tier, block.requested_bytes, born);
  if (heap.pool != nullptr) heap.pool->allocated_bytes += born ? block.bytes : -block.bytes;
  count_class(block, born);
}

void DeviceAllocator::count_class(const Block& block, bool born) {
  ClassStats& stats = stats_.by_class[static_cast<std::size_t>(block.tensor_class)];
  stats.allocation.change(1, born);
  stats.allocated_bytes.change(block.bytes, born);
  stats.requested_bytes.change(block.requested_bytes, born);
}

void DeviceAllocator::count_active(const Block& block, bool born) {
  const Tier tier = block.segment->heap->tier;
  stats_.active.change(tier, 1, born);
  stats_.active_bytes.change(tier, block.bytes, born);
}

bool DeviceAllocator::free(std::uintptr_t address) {
  const std::lock_guard lock(locks_.books);
  Block* block = segments_.live_block(address);
  if (block == nullptr) return false;
  count_live(*block, false);
  if (block->other_streams.empty())
    retire(block);
  else
    wait_for_streams(block);
  return true;
}

// No other stream uses the block any more.
void DeviceAllocator::retire(Block* block) {
  if (!poisons(*block)) return settle(block);
  block->state = BlockState::pending;
  freed_[user_of(*block).stream].push_back(block);
}

bool DeviceAllocator::poisons(const Block& block) const {
  return config_.poisons && active_pools_.empty() && block.segment->heap->pool == nullptr;
}

// On the stream whose requests the block serves. With `books`, though the driver may keep the
// caller waiting: nobody gets the block before.
void DeviceAllocator::poison(const Block& block) {
  if (poisons(block))
    driver_.fill(device_, user_of(block).stream, {block.address, block.bytes}, kPoison);
}

void DeviceAllocator::poison_freed(StreamId stream) {
  const auto found = freed_.find(stream);
  if (found == freed_.end()) return;
  const std::vector<Block*> blocks = std::move(found->second);
  freed_.erase(found);
  for (Block* block : blocks) {
    poison(*block);
    settle(block);
  }
}

// Where memory of other streams is needed: what they have freed goes back as it is. Whoever gets it
// comes behind all streams, and gets it poisoned.
void DeviceAllocator::settle_freed() {
  for (const auto& [stream, blocks] : std::exchange(freed_, {}))
    for (Block* block : blocks) settle(block);
}

// A block goes back to its heap, or to its borrower.
void DeviceAllocator::settle(Block* block) {
  Heap& heap = *block->segment->heap;
  if (block->borrower != nullptr) {
    block->state = BlockState::pending;
    block->borrower->free_borrowed.push_back(block);
    return;
  }
  count_active(*block, false);
  if (block->segment->is_alias) {
    block->state = BlockState::cached;
    heap.free_aliases.push_back(block);
    return;
  }
  if (unspilled(*block)) count_unspilled(*block, false);  // what is next in its place is spilled
  segments_.put_back(block);
}

bool DeviceAllocator::record_stream(std::uintptr_t address, DeviceStream stream) {
  const std::lock_guard lock(locks_.books);
  Block* block = segments_.live_block(address);
  if (block == nullptr) return false;
  std::vector<DeviceStream>& streams = block->other_streams;
  if (stream != DeviceStream{device_, user_of(*block).stream} &&
      std::find(streams.begin(), streams.end(), stream) == streams.end())
    streams.push_back(stream);
  return true;
}

void DeviceAllocator::wait_for_streams(Block* block) {
  block->state = BlockState::pending;
  uses_.await(block, user_of(*block).stream, !active_pools_.empty());
}

void DeviceAllocator::synchronize_events() {
  settle_freed();
  if (!uses_.has_pending()) return;
  ++stats_.num_sync_all_streams;
  uses_.wait_for_all([this](Block* block) { settle(block); });
}

bool DeviceAllocator::retag(std::uintptr_t address, TensorClass tensor_class) {
  {
    const std::lock_guard lock(locks_.books);
    Block* block = segments_.live_block(address);
    if (block == nullptr) return false;
    if (block->tensor_class == tensor_class) return true;
    count_class(*block, false);
    block->tensor_class = tensor_class;
    count_class(*block, true);
    if (!needs_advice(*block)) return true;
  }
  const BothLocks locks(locks_);
  Block* block = segments_.live_block(address);
  if (block != nullptr && needs_advice(*block))
    apply_advice(block, routes_.profile_of(block->tensor_class));
  return true;
}

// Whether a live block's class has other advice than its pages carry. A spilled block stays on the
// host because of the budget. A block that shares pages stays too.
bool DeviceAllocator::needs_advice(const Block& block) const {
  const Heap& heap = *block.segment->heap;
  const std::uint8_t profile = routes_.profile_of(block.tensor_class);
  return heap.tier == Tier::large && block.advice != routes_.managed_spill_profile() &&
         routes_.profile(profile).kind == heap.kind &&
         takes_advice(routes_.profile(profile).kind) && block.advice != profile;
}

void DeviceAllocator::set_release_listener(std::shared_ptr<ReleaseListener> listener) {
  const BothLocks locks(locks_);
  // The old listener is destroyed after the locks are released: it may have to end threads.
  release_listener_.swap(listener);
}

std::optional<Range> DeviceAllocator::base_allocation(std::uintptr_t address) const {
  const std::lock_guard lock(locks_.books);
  return segments_.find(address);
}

void DeviceAllocator::set_memory_fraction(double fraction) {
  const std::lock_guard lock(locks_.books);
  budget_.set_fraction(fraction);
}

double DeviceAllocator::memory_fraction() const {
  const std::lock_guard lock(locks_.books);
  return budget_.fraction();
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

void DeviceAllocator::begin_pool(PoolId id, StreamFilter filter) {
  const BothLocks locks(locks_);
  std::unique_ptr<Pool>& pool = pools_[id];
  if (pool == nullptr) {
    pool = std::make_unique<Pool>();
    pool->id = id;
  }
  ++pool->users;
  active_pools_.push_back({id, std::move(filter)});
}

void DeviceAllocator::end_pool(PoolId id) {
  const BothLocks locks(locks_);
  std::erase_if(active_pools_, [&](const ActivePool& active) { return active.id == id; });
  if (!active_pools_.empty()) return;
  for (Block* block : uses_.take_deferred()) wait_for_streams(block);
}

void DeviceAllocator::release_pool(PoolId id) {
  const BothLocks locks(locks_);
  const auto found = pools_.find(id);
  if (found == pools_.end() || found->second->users == 0) return;
  Pool& pool = *found->second;
  if (--pool.users == 0 && pool.segments == 0 && active_pools_.empty()) pools_.erase(found);
}

DeviceStats DeviceAllocator::stats() const {
  const std::lock_guard lock(locks_.books);
  return stats_;
}

void DeviceAllocator::reset_peak_stats() {
  const std::lock_guard lock(locks_.books);
  stats_.reset_peak();
}

std::size_t DeviceAllocator::take_peak_bytes() {
  const std::lock_guard lock(locks_.books);
  return static_cast<std::size_t>(
      std::exchange(peak_bytes_, stats_.allocated_bytes.all.current));
}

void DeviceAllocator::reset_accumulated_stats() {
  const std::lock_guard lock(locks_.books);
  stats_.reset_accumulated();
}

std::vector<PoolStats> DeviceAllocator::pool_stats() const {
  const std::lock_guard lock(locks_.books);
  std::vector<PoolStats> all;
  for (const auto& [id, pool] : pools_)
    all.push_back({id, pool->reserved_bytes, pool->allocated_bytes, pool->users > 0});
  return all;
}

std::array<KindStats, kKinds> DeviceAllocator::kind_stats() const {
  const std::lock_guard lock(locks_.books);
  return kind_stats_;
}

std::vector<SegmentSnapshot> DeviceAllocator::segments() const {
  const std::lock_guard lock(locks_.books);
  std::vector<SegmentSnapshot> all;
  for (const auto& [address, segment] : segments_) {
    const Heap& heap = *segment.heap;
    SegmentSnapshot snapshot{.address = address,
                             .bytes = segment.bytes,
                             .stream = heap.stream,
                             .tier = heap.tier,
                             .kind = heap.kind,
                             .pool = heap.pool == nullptr ? PoolId{0, 0} : heap.pool->id,
                             .is_expandable = segment.is_expandable,
                             .blocks = {}};
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      snapshot.blocks.push_back({block->address, block->bytes, block->requested_bytes,
                                 block->state, block->tensor_class, user_of(*block).stream});
    all.push_back(std::move(snapshot));
  }
  return all;
}

void DeviceAllocator::append_live_blocks(std::vector<LiveBlock>& to) const {
  const std::lock_guard lock(locks_.books);
  for (const auto& [address, segment] : segments_)
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      if (block->state == BlockState::live) to.push_back(live(*block));
}

std::optional<LiveBlock> DeviceAllocator::live_block(std::uintptr_t address) {
  const std::lock_guard lock(locks_.books);
  const Block* block = segments_.live_block(address);
  return block == nullptr ? std::nullopt : std::optional(live(*block));
}

LiveBlock DeviceAllocator::live(const Block& block) const {
  return {block.address,      block.requested_bytes, block.bytes,
          block.tensor_class, device_,               block.segment->heap->kind};
}

}  // namespace umem
