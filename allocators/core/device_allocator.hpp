// The caching allocator of one device: heaps of cached blocks, cut from segments of four kinds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/budget.hpp"
#include "core/driver.hpp"
#include "core/heap.hpp"
#include "core/host_copy.hpp"
#include "core/locks.hpp"
#include "core/mapped_memory.hpp"
#include "core/routes.hpp"
#include "core/segments.hpp"
#include "core/statistics.hpp"
#include "core/stream_uses.hpp"
#include "core/types.hpp"

namespace umem {

struct LiveBlock {
  std::uintptr_t address;
  std::size_t requested_bytes;
  std::size_t bytes;
  TensorClass tensor_class;
  int device;
  MemoryKind kind;
};

struct PoolStats {
  PoolId id;
  std::size_t reserved_bytes;
  std::size_t allocated_bytes;
  bool in_use;
};

struct KindStats {
  std::size_t reserved_bytes = 0;
  std::size_t spilled_bytes = 0;  // on the host because of the budget
};

struct BlockSnapshot {
  std::uintptr_t address;
  std::size_t bytes, requested_bytes;
  BlockState state;
  TensorClass tensor_class;
  StreamId stream;  // its segment's, or the borrower's
};

struct SegmentSnapshot {
  std::uintptr_t address;
  std::size_t bytes;
  StreamId stream;
  Tier tier;
  MemoryKind kind;
  PoolId pool;
  bool is_expandable;
  std::vector<BlockSnapshot> blocks;
};

// What DeviceAllocator::pause did.
struct PauseReport {
  std::size_t returned_bytes;  // plain device memory that the driver has again
  std::size_t kept_bytes;      // on the device still
  std::size_t evicted_bytes;   // managed memory whose pages went to the host
  std::size_t host_bytes;      // of the copy of what was returned
};

inline constexpr std::size_t kMostPinnedSegmentBytes = std::size_t{1} << 30;

using StreamFilter = std::function<bool(StreamId)>;

// Thread-safe, see Note [Locks of a device] in locks.hpp.
class DeviceAllocator {
 public:
  DeviceAllocator(int device, const Config& config, SegmentSource& source, Driver& driver,
                  SharedLimits& limits);
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;
  ~DeviceAllocator();  // gives all segments back, live blocks' too

  // A block of at least `bytes`, aligned to 512 bytes; to 64 KiB, with pages of its own, from 2 MiB
  // on. nullptr for 0 bytes. Throws OutOfMemory; PauseError while the device is paused.
  void* allocate(std::size_t bytes, StreamId stream, TensorClass tensor_class);
  // The same, but nullptr without memory, which does not count as an out-of-memory.
  void* try_allocate(std::size_t bytes, StreamId stream, TensorClass tensor_class);
  // False when no live block starts at `address`.
  bool free(std::uintptr_t address);
  bool record_stream(std::uintptr_t address, DeviceStream stream);
  bool record_stream(std::uintptr_t address, StreamId stream) {
    return record_stream(address, DeviceStream{device_, stream});
  }
  bool retag(std::uintptr_t address, TensorClass tensor_class);
  void empty_cache();
  // 0: no budget. Gives cached segments back if they exceed it; blocks stay where they are until
  // they are freed.
  void set_device_budget(std::size_t bytes);
  // Serves the next requests of a class as those of class `other`, until `bytes` in all; the
  // request that does not fit, and those behind it, are served as the class's own. Returns what was
  // left before.
  std::size_t set_device_room(TensorClass tensor_class, std::size_t bytes);
  // Locks memory for later requests that are page-locked, beside the program; ends what was begun.
  void lock_ahead(std::size_t bytes, StreamId stream);
  void end_locking_ahead();
  // Counts page-locked memory that somebody else has mapped on the device, by `bytes` more or less:
  // its page tables are in device memory, too.
  void count_page_locked(std::ptrdiff_t bytes);
  // A stream of umem's own. What its work uses of other streams' memory is freed only once a stream
  // of the program waits for that work: who waits for all of those need not wait for this one.
  void add_own_stream(StreamId stream);
  // Gives spilled blocks that own their pages the advice of their classes, as if memory had been
  // free from the start, and returns them: their bytes are still on the host. Leaves out classes
  // that the policy places on the host.
  std::vector<LiveBlock> unspill();
  void set_release_listener(std::shared_ptr<ReleaseListener> listener);
  void set_memory_fraction(double fraction);
  double memory_fraction() const;
  std::optional<Range> base_allocation(std::uintptr_t address) const;
  // Lets another GPU of the process access this one's memory. False where the driver refuses.
  bool add_peer(int peer);
  // Takes later memory from the source, between whose segments GPUs without access copy.
  void stop_mapping();

  // Waits for the device, copies the contents of expandable segments to the host and gives their
  // memory back; addresses stay. Until resume() nothing may use the device's memory: an access is
  // an illegal address. Allocations throw PauseError; frees and statistics work. Throws PauseError
  // while paused, during a capture, and where it needs more than `host_available_bytes` of host
  // memory. Then it has given back nothing but the cache.
  PauseReport pause(std::size_t host_available_bytes);
  // Throws PauseError where the device lacks the memory: then it stays paused.
  void resume();
  bool is_paused() const;

  void begin_pool(PoolId id, StreamFilter filter);
  void end_pool(PoolId id);
  void release_pool(PoolId id);

  DeviceStats stats() const;
  void reset_peak_stats();
  // The most bytes that live blocks had at once since the last call; independent of the above.
  std::size_t take_peak_bytes();
  void reset_accumulated_stats();
  std::vector<PoolStats> pool_stats() const;
  std::array<KindStats, kKinds> kind_stats() const;
  std::vector<SegmentSnapshot> segments() const;
  void append_live_blocks(std::vector<LiveBlock>& to) const;
  // The live block that starts at an address.
  std::optional<LiveBlock> live_block(std::uintptr_t address);

  // Both locks, for fork: the child must not inherit one that another thread held.
  void lock() { locks_.lock(); }
  void unlock() { locks_.unlock(); }

 private:
  using BothLocks = std::lock_guard<Locks>;

  struct ActivePool {
    PoolId id;
    StreamFilter filter;
  };
  struct Request {
    std::size_t bytes;
    StreamId stream;
    TensorClass tensor_class;
    std::optional<bool> in_room{};  // whether it is served as one of class `other`
  };
  // A request on its way down the ladder.
  struct Attempt {
    Heap& heap;
    TensorClass tensor_class;
    std::size_t bytes;
    Shortage& shortage;
    Range growth{};  // where handles would be mapped for it; of no bytes: a segment of its own
    bool exceeds_budget = false;     // new memory would
    bool has_emptied_cache = false;  // for it
    bool starts_again = false;       // from the first rung
    std::optional<Stopwatch> stopwatch{};  // runs once the cache has no block

    std::size_t new_bytes() const {
      return growth.bytes != 0 ? growth.bytes : round_up(bytes, kPageBytes);
    }
  };
  // A rung of the ladder.
  struct Step {
    std::optional<Rung> rung;  // counted; none: steps of its own are, or it never serves
    Block* (DeviceAllocator::*try_it)(Attempt& attempt);
    bool may_block;  // waits, or gives memory back or to others: not while a pool is open
  };
  // Memory that has left the books and is still to be given back.
  struct LeavingMemory {
    struct Piece {
      MemoryKind kind;
      void* raw;
      std::size_t raw_bytes;
    };
    EventId work = 0;              // that may still use it
    std::vector<Range> announced;  // to the release listener
    std::vector<Piece> pieces;     // of the source
    std::vector<Run> mapped;
  };

  void* serve(Request request, Shortage& shortage);
  std::pair<Heap*, std::size_t> heap_and_bytes_for(Request& request);
  Pool* pool_for(StreamId stream);
  Heap& heap_for(std::uint8_t route, StreamId stream, Pool* pool);

  Block* find_cached(const Heap& heap, std::size_t bytes) const;
  Block* take_cached(Heap& heap, std::size_t bytes);
  Block* take(Heap& heap, Block* block, std::size_t bytes);

  Block* climb(Attempt& attempt);
  Block* walk(std::span<const Step> steps, Attempt& attempt);
  Block* try_cached(Attempt& attempt);
  Block* try_ending_aliases(Attempt& attempt);
  Block* try_spilled_before(Attempt& attempt);
  Block* try_mapping(Attempt& attempt);
  Block* try_segment(Attempt& attempt);
  Block* try_gathering(Attempt& attempt);
  template <Streams from>
  Block* try_taking_back(Attempt& attempt);
  Block* try_alias(Attempt& attempt);
  template <Streams from>
  Block* try_borrowing(Attempt& attempt);
  Block* try_gathered_alias(Attempt& attempt);
  Block* try_waiting(Attempt& attempt);
  Block* try_making_room(Attempt& attempt);
  Block* try_spilling(Attempt& attempt);
  Block* try_waiting_for_all(Attempt& attempt);
  Block* try_full_device(Attempt& attempt);
  Block* try_moving_handles(Attempt& attempt);
  Block* try_without_cache(Attempt& attempt);
  Block* try_spilling_from_full_device(Attempt& attempt);
  Block* take_growth(Attempt& attempt);
  Block* spill(Attempt& attempt);
  bool exceeds_budget(const Attempt& attempt) const;

  std::size_t segment_bytes_for(const Heap& heap, std::size_t bytes) const;
  Block* new_segment(Heap& heap, std::size_t bytes, Shortage& shortage);
  Block* add_segment(const Segment& fresh);
  bool lock_segment(Heap& heap, std::size_t bytes);
  void wait_for_locking(std::unique_lock<std::mutex>& books, const Heap& heap, std::size_t bytes);
  void prepare(Segment& segment);
  bool reserve(const Heap& heap, std::size_t bytes, Shortage& shortage);
  bool waiting_helps(const Attempt& attempt) const;
  std::vector<Spare> movable_spares(const Range& growth) const;
  std::size_t movable_bytes(const Range& growth) const;
  bool make_room(Heap& heap, std::size_t bytes, std::size_t excess, const Range& growth);
  bool room_was_in_vain(const Heap& heap, std::size_t bytes) const;
  void trim_to_budget(std::size_t more_bytes);
  void count_page_tables(std::size_t more_locked_bytes = 0);
  bool unspilled(const Block& block) const;
  bool needs_advice(const Block& block) const;
  void count_unspilled(const Block& block, bool on_device);
  LiveBlock live(const Block& block) const;

  void end_all_aliases();
  Block* free_borrowed(const Heap& heap, std::size_t bytes) const;
  Block* borrow(Heap& heap, std::size_t bytes, Streams from);
  void take_back(const Heap* owner, Streams from);
  void gather_free_memory();
  bool expand(Heap& heap, const Range& growth, Shortage& shortage);
  void take_out_mapped(const Spare& spare, LeavingMemory& leaving);
  void count_memory(const Heap& heap, std::size_t bytes, std::size_t raw_bytes, bool more);
  void check_not_paused() const;
  void bring_back();

  void* hand_out(Block* block, std::size_t requested_bytes, TensorClass tensor_class);
  void apply_advice(Block* block, std::uint8_t profile);
  bool advise(const Segment& segment, Range range, std::uint8_t profile);
  void note_hint(bool taken, bool& has_warned, const char* what);
  std::size_t room_beside_headroom() const;
  void count_live(const Block& block, bool born);
  void count_class(const Block& block, bool born);

  void count_active(const Block& block, bool born);
  void retire(Block* block);
  bool poisons(const Block& block) const;
  void poison(const Block& block);
  void poison_freed(StreamId stream);
  void settle_freed();
  void settle(Block* block);
  void wait_for_streams(Block* block);
  void synchronize_events();

  void release_spares(std::vector<Spare> spares);
  void take_out_segment(Block* block, LeavingMemory& leaving);
  EventId record_work(std::vector<Spare>& spares);
  void append_piece(const Segment& segment, LeavingMemory& leaving) const;
  void give_back(const LeavingMemory& leaving);
  std::string budget_use() const;
  [[noreturn]] void throw_out_of_memory(std::size_t bytes, TensorClass tensor_class,
                                        Shortage shortage);

  const int device_;
  const Config config_;
  SegmentSource& source_;
  Driver& driver_;
  SharedLimits& limits_;

  mutable Locks locks_;
  std::recursive_mutex locker_mutex_;  // of the thread that locks ahead; taken first
  std::thread locker_;
  int locker_process_ = 0;
  std::atomic<bool> locking_ends_ = true;
  const Heap* locking_heap_ = nullptr;  // of the segment that is being locked; nullptr: none is
  std::size_t locking_bytes_ = 0;
  std::condition_variable segment_locked_;
  bool cache_closed_ = false;  // the device is being paused or resumed: allocations wait
  StreamUses uses_{device_, driver_, locks_};
  Routes routes_;

  std::unordered_map<StreamId, StreamHeaps> heaps_;
  std::map<PoolId, std::unique_ptr<Pool>> pools_;
  std::vector<ActivePool> active_pools_;

  std::map<StreamId, std::vector<Block*>> freed_;  // by user: they are poisoned before its next one

  DeviceStats stats_;
  Segments segments_{stats_};
  Budget budget_;
  MappedMemory mapped_{device_, driver_, locks_, uses_, segments_, budget_};
  std::array<KindStats, kKinds> kind_stats_{};
  std::size_t system_bytes_ = 0;         // Segment::device_bytes of all segments
  bool has_warned_of_advice_ = false, has_warned_of_prefetch_ = false;
  std::int64_t peak_bytes_ = 0;          // since take_peak_bytes()
  std::unique_ptr<HostCopy> paused_;     // nullptr: it is not. Expandable segments have no memory
  std::shared_ptr<ReleaseListener> release_listener_;
};

}  // namespace umem
