// The allocator of a process: one DeviceAllocator per device, one class context, one managed cap.
//
// Note [Several GPUs]
//
// Whatever a process allocates on a GPU may be used by streams of its others. `record_stream` of
// such a stream waits for an event of the stream's own device. torch names the default streams of
// all devices alike: then those of all GPUs that the process uses are waited for.
//
// A GPU gets access to the mapped memory of the others when the process first allocates on it.
// Where the driver refuses, both take new memory by `cudaMalloc`, which can be copied without
// access, and a warning says so.
//
// Note [Processes]
//
// The allocator is never destroyed: tensors outlive static objects, and CUDA may be gone by then.
// Locks are held across `fork`, so that a DataLoader worker that drops a tensor finds them free. A
// child process makes no CUDA calls.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "core/class_context.hpp"
#include "core/device_allocator.hpp"

namespace umem {

// Is told of each block once it is handed out, and before it is freed, without locks held.
class BlockListener {
 public:
  virtual ~BlockListener() = default;

  virtual void block_changes(const LiveBlock& block, StreamId stream, bool is_born) noexcept = 0;
};

class Allocator {
 public:
  Allocator(const Config& config, std::unique_ptr<SegmentSource> source,
            std::unique_ptr<Driver> driver, int devices);

  // Throws std::out_of_range for a device that does not exist.
  DeviceAllocator& device(int number) {
    return *devices_.at(static_cast<std::size_t>(number));
  }
  int device_count() const { return static_cast<int>(devices_.size()); }

  void* allocate(std::size_t bytes, int device_number, StreamId stream);
  // False if no live block of the device starts at the address.
  bool free(std::uintptr_t address, int device_number, StreamId stream);
  // These find the block on whichever device holds it; false when none does.
  bool record_stream(std::uintptr_t address, StreamId stream);
  bool retag(std::uintptr_t address, TensorClass tensor_class);
  std::optional<Range> base_allocation(std::uintptr_t address) const;
  void empty_cache();
  // As DeviceAllocator::pause; also waits for the other devices, which may access its memory.
  PauseReport pause(int device_number, std::size_t host_available_bytes);
  std::vector<LiveBlock> live_blocks() const;

  ClassContext& classes() { return classes_; }
  // nullptr for none. The allocator keeps the listener alive.
  void set_release_listener(const std::shared_ptr<ReleaseListener>& listener);

  // nullptr for none. A listener is never deleted: other threads may be inside it.
  void set_block_listener(BlockListener* listener) { block_listener_.store(listener); }

  // Nanoseconds in which requests waited that the caches had no memory for.
  std::int64_t uncached_ns() const;
  std::size_t managed_bytes() const { return limits_.managed.held_bytes(); }
  // What the cap on page-locked memory leaves; 0 without one.
  std::size_t pinned_room_bytes() const {
    const std::size_t limit = limits_.pinned.limit_bytes(), held = limits_.pinned.held_bytes();
    return limit > held ? limit - held : 0;
  }
  // Moves the cap on page-locked memory to so many bytes above what is held.
  void set_pinned_room(std::size_t bytes) { limits_.pinned.set_room(bytes); }

  // Around fork(): a child must find every lock free.
  void lock_all();
  void unlock_all();

 private:
  void* allocate_on(DeviceAllocator& device, std::size_t bytes, StreamId stream);
  void introduce(int device_number);
  void tell(DeviceAllocator& device, std::uintptr_t address, StreamId stream, bool is_born);

  std::unique_ptr<SegmentSource> source_;
  std::unique_ptr<Driver> driver_;
  SharedLimits limits_;
  const std::vector<std::size_t> managed_bytes_of_device_;
  ClassContext classes_;
  std::atomic<BlockListener*> block_listener_ = nullptr;
  std::mutex used_mutex_;
  std::vector<std::atomic<bool>> used_;  // devices with an allocation so far
  std::vector<std::unique_ptr<DeviceAllocator>> devices_;  // destroyed first: they use the above
};

}  // namespace umem
