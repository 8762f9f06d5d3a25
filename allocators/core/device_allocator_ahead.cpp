// Note [Locking ahead]
//
// Page-locking gigabytes takes seconds, in which the card could work. Who knows that a training
// will keep so much on the host has a thread lock it beforehand, in segments as large as requests
// lock at most: smaller ones leave rests that serve no tensor. Each is counted against all limits
// before the call, and cached when it is there. The thread holds no lock during the call, and only
// a request that the very segment may serve waits for it. A refusal ends it, as does a pause. A
// child made by `fork` has no such thread.
#include <unistd.h>

#include "core/device_allocator.hpp"
#include "core/signals_blocked.hpp"

namespace umem {

void DeviceAllocator::lock_ahead(std::size_t bytes, StreamId stream) {
  const std::lock_guard owner(locker_mutex_);
  end_locking_ahead();
  const std::lock_guard lock(locks_.books);
  Heap& heap = heap_for(routes_.route_for(TensorClass::optimizer_state, bytes), stream, nullptr);
  if (bytes < kPageBytes || heap.kind != MemoryKind::pinned || paused_ != nullptr) return;
  locking_ends_ = false;
  locker_process_ = getpid();
  const SignalsBlocked blocked;
  locker_ = std::thread([this, &heap, left = bytes]() mutable {
    for (std::size_t part = 0; left != 0; left -= part) {
      part = std::min(left, kMostPinnedSegmentBytes);
      if (!lock_segment(heap, round_up(part, kPageBytes))) return;
    }
  });
}

void DeviceAllocator::end_locking_ahead() {
  const std::lock_guard owner(locker_mutex_);
  locking_ends_ = true;
  if (!locker_.joinable()) return;
  if (locker_process_ == getpid())
    locker_.join();
  else
    locker_.detach();  // the parent's
}

bool DeviceAllocator::lock_segment(Heap& heap, std::size_t bytes) {
  Shortage shortage;
  {
    const std::lock_guard lock(locks_.books);
    if (locking_ends_ || !reserve(heap, bytes, shortage)) return false;
    locking_heap_ = &heap;
    locking_bytes_ = bytes;
  }
  void* raw = nullptr;
  try {
    raw = source_.allocate(heap.kind, device_, bytes);
  } catch (const std::exception&) {  // a refusal, too
  }
  const BothLocks locks(locks_);
  locking_heap_ = nullptr;
  segment_locked_.notify_all();
  const auto address = reinterpret_cast<std::uintptr_t>(raw);  // aligned, as PinnedMemory has it
  if (raw == nullptr)
    budget_.give_back(heap.kind, bytes);
  else
    segments_.put_back(add_segment({address, bytes, raw, bytes, &heap}));
  stats_.locked_ahead_bytes += raw == nullptr ? 0 : static_cast<std::int64_t>(bytes);
  return raw != nullptr;
}

// For a request that the cache cannot serve: until it can, or no segment is being locked for it.
void DeviceAllocator::wait_for_locking(std::unique_lock<std::mutex>& books, const Heap& heap,
                                       std::size_t bytes) {
  const auto comes = [&] {
    return locking_heap_ == &heap && locking_bytes_ >= bytes && locker_process_ == getpid();
  };
  if (!comes()) return;
  const Stopwatch stopwatch(stats_.uncached_ns);
  segment_locked_.wait(books, [&] { return !comes() || find_cached(heap, bytes) != nullptr; });
}

}  // namespace umem
