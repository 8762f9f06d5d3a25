// Page-locked memory that is locked before it is asked for, beside the program.
//
// Note [Locking ahead]
//
// Touching and registering gigabytes takes seconds, in which the card could work. Who knows that a
// training will keep so much on the host has it locked by a thread, one segment after the other,
// while the first passes run. A segment is counted against every limit before the call, as new
// memory is, and cached when it is there: requests take it like any other. The thread holds no lock
// during the call, so that other threads get new memory meanwhile. Only a request that the very
// segment may serve waits for it: to lock another one would take as long.
//
// What a limit or the host refuses ends it, as does a pause, and requests lock their own memory as
// without it. A child made by `fork` has neither the thread nor this memory, and waits for nothing.
#include <unistd.h>

#include <system_error>

#include "core/device_allocator.hpp"
#include "core/signals_blocked.hpp"

namespace umem {

void DeviceAllocator::lock_ahead(std::vector<std::size_t> sizes, StreamId stream,
                                 TensorClass tensor_class) {
  end_locking_ahead(false);
  const std::lock_guard owner(locker_mutex_);
  Heap* heap = nullptr;
  {
    const std::lock_guard lock(locks_.books);
    if (sizes.empty() || cache_closed_ || paused_ != nullptr) return;
    heap = &heap_for(routes_.route_for(tensor_class, sizes.front()), stream, nullptr);
    if (heap->kind != MemoryKind::pinned) return;
    locking_ends_ = false;
  }
  const SignalsBlocked blocked;
  locker_process_ = getpid();
  try {
    locker_ = std::thread([this, heap, sizes = std::move(sizes)] { lock_segments(*heap, sizes); });
  } catch (const std::system_error&) {  // no more threads: requests lock their own
  }
}

void DeviceAllocator::end_locking_ahead(bool gives_back) {
  const std::lock_guard owner(locker_mutex_);
  {
    const std::lock_guard lock(locks_.books);
    locking_ends_ = true;
  }
  if (!locker_.joinable()) return;
  if (locker_process_ != getpid()) return locker_.detach();  // the parent's
  if (!gives_back) return locker_.join();
  // Unlocking waits for the device, and for the segment that is being locked.
  const auto before = std::make_shared<std::thread>(std::move(locker_));
  const auto finish = [this, before] {
    before->join();
    give_back_page_locked();
  };
  const SignalsBlocked blocked;
  try {
    locker_ = std::thread(finish);
  } catch (const std::system_error&) {
    finish();
  }
}

void DeviceAllocator::give_back_page_locked() {
  const BothLocks locks(locks_);
  if (!active_pools_.empty()) return;
  std::vector<Spare> spares = segments_.spares();
  std::erase_if(spares, [](const Spare& spare) {
    return spare.block->segment->heap->kind != MemoryKind::pinned;
  });
  release_spares(std::move(spares));
}

void DeviceAllocator::lock_segments(Heap& heap, const std::vector<std::size_t>& sizes) {
  for (const std::size_t bytes : sizes) {
    try {
      if (!lock_segment(heap, round_up(bytes, kPageBytes))) break;
    } catch (const std::exception&) {  // the host has no memory
      break;
    }
  }
  const std::lock_guard lock(locks_.books);
  locking_ = {};
  segment_locked_.notify_all();
}

// False where it ends.
bool DeviceAllocator::lock_segment(Heap& heap, std::size_t bytes) {
  Shortage shortage;
  {
    const std::lock_guard lock(locks_.books);
    if (locking_ends_ || !reserve(heap, bytes, shortage)) return false;
    locking_ = {&heap, bytes, getpid()};
  }
  const auto refuse = [&](void* raw) {
    if (raw != nullptr) source_.deallocate(heap.kind, device_, raw, bytes);
    budget_.give_back(heap.kind, bytes);
    return false;
  };
  void* raw = nullptr;
  try {
    raw = source_.allocate(heap.kind, device_, bytes);
  } catch (...) {
    refuse(nullptr);
    throw;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  if (raw == nullptr || address % kPageBytes != 0) return refuse(raw);
  const BothLocks locks(locks_);
  segments_.put_back(add_segment(
      {.address = address, .bytes = bytes, .raw = raw, .raw_bytes = bytes, .heap = &heap}));
  stats_.locked_ahead_bytes += static_cast<std::int64_t>(bytes);
  locking_ = {};
  segment_locked_.notify_all();
  return true;
}

// For a request that the cache cannot serve: until it can, or no segment is being locked for it.
void DeviceAllocator::wait_for_locking(std::unique_lock<std::mutex>& books, const Heap& heap,
                                       std::size_t bytes) {
  const auto serves = [&] {
    return locking_.heap == &heap && locking_.bytes >= bytes && locking_.process == getpid();
  };
  if (!serves()) return;
  const Stopwatch stopwatch(stats_.uncached_ns);
  segment_locked_.wait(books, [&] { return !serves() || find_cached(heap, bytes) != nullptr; });
}

}  // namespace umem
