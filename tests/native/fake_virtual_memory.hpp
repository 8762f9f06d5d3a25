// Virtual memory management without a GPU, which checks how the core treats it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "check.hpp"
#include "core/driver.hpp"

namespace umem {

// Physical memory that is handed out in handles, and addresses that they are mapped into. Nothing
// may be mapped over, unmapped, released or given to a peer that is not as the core says.
class FakeVirtualMemory final : public VirtualMemory {
 public:
  ~FakeVirtualMemory() override {
    CHECK_EQUAL(handles_.size(), 0U);  // a handle that nobody released
    CHECK_EQUAL(reserved_.size(), 0U);
  }

  std::size_t granularity(int) noexcept override { return kPageBytes; }
  std::uintptr_t reserve(int, std::size_t bytes, std::size_t alignment) noexcept override {
    const std::lock_guard lock(mutex_);
    if (refuses_addresses_) return 0;
    const std::size_t mapped_bytes = bytes + alignment;
    void* mapped = mmap(nullptr, mapped_bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(mapped != MAP_FAILED);
    const std::uintptr_t address = round_up(reinterpret_cast<std::uintptr_t>(mapped), alignment);
    reserved_[address] = {bytes, mapped, mapped_bytes};
    return address;
  }
  void unreserve(Range range) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = reserved_.find(range.address);
    CHECK(found != reserved_.end());
    CHECK_EQUAL(found->second.bytes, range.bytes);
    const auto inside = mapped_.lower_bound(range.address);
    CHECK(inside == mapped_.end() || inside->first >= range.address + range.bytes);
    munmap(found->second.raw, found->second.raw_bytes);
    reserved_.erase(found);
  }
  HandleId create(int device, std::size_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    if (capacity_bytes_ != 0 && held_bytes_ + bytes > capacity_bytes_) return 0;
    handles_[++last_handle_] = {device, bytes, 0};
    held_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, held_bytes_);
    ++created_;
    return last_handle_;
  }
  void release(HandleId id) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(id);
    CHECK(found != handles_.end());
    CHECK_EQUAL(found->second.address, 0U);
    held_bytes_ -= found->second.bytes;
    handles_.erase(found);
  }
  bool map(int device, Range range, std::size_t handle_bytes,
           std::span<const HandleId> handles) noexcept override {
    const std::lock_guard lock(mutex_);
    if (refuses_maps_) return false;
    const auto home = std::prev(reserved_.upper_bound(range.address));
    CHECK(range.address + range.bytes <= home->first + home->second.bytes);
    CHECK_EQUAL(range.address % handle_bytes, 0U);
    CHECK_EQUAL(range.bytes % handle_bytes, 0U);
    for (std::size_t i = 0; i < range.bytes / handle_bytes; ++i) {
      Handle& handle = handles_.at(handles[i]);
      CHECK_EQUAL(handle.device, device);
      CHECK_EQUAL(handle.bytes, handle_bytes);
      CHECK_EQUAL(handle.address, 0U);
      handle.address = range.address + i * handle_bytes;
      CHECK(mapped_.emplace(handle.address, handles[i]).second);
      accessible_[handle.address] = peers_[device];
    }
    ++maps_;
    return true;
  }
  void unmap(Range range, std::size_t handle_bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    for (std::size_t offset = 0; offset < range.bytes; offset += handle_bytes) {
      const auto found = mapped_.find(range.address + offset);
      CHECK(found != mapped_.end());
      CHECK_EQUAL(handles_.at(found->second).bytes, handle_bytes);
      handles_.at(found->second).address = 0;
      accessible_.erase(found->first);
      mapped_.erase(found);
    }
    ++unmaps_;
    if (on_unmap_) on_unmap_();
  }
  bool add_peer(int device, int peer, std::span<const Range> mapped) noexcept override {
    const std::lock_guard lock(mutex_);
    peers_[device].insert(peer);
    for (const Range& range : mapped)
      for (auto at = accessible_.lower_bound(range.address);
           at != accessible_.end() && at->first < range.address + range.bytes; ++at)
        at->second.insert(peer);
    return true;
  }

  void set_capacity(std::size_t bytes) {  // 0: no bound
    const std::lock_guard lock(mutex_);
    capacity_bytes_ = bytes;
  }
  void refuse_addresses(bool refuse) {
    const std::lock_guard lock(mutex_);
    refuses_addresses_ = refuse;
  }
  void refuse_maps(bool refuse) {
    const std::lock_guard lock(mutex_);
    refuses_maps_ = refuse;
  }
  void on_unmap(std::function<void()> hook) { on_unmap_ = std::move(hook); }
  std::size_t held_bytes() const {  // of all handles, mapped or not
    const std::lock_guard lock(mutex_);
    return held_bytes_;
  }
  std::size_t peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_bytes_;
  }
  std::size_t created() const {
    const std::lock_guard lock(mutex_);
    return created_;
  }
  std::size_t maps() const {
    const std::lock_guard lock(mutex_);
    return maps_;
  }
  std::size_t unmaps() const {
    const std::lock_guard lock(mutex_);
    return unmaps_;
  }
  // Whether each byte is mapped, for the GPU itself and for `peers`.
  bool holds(std::uintptr_t address, std::size_t bytes, const std::set<int>& peers = {}) const {
    const std::lock_guard lock(mutex_);
    for (std::uintptr_t at = address; at < address + bytes;) {
      const auto after = mapped_.upper_bound(at);
      if (after == mapped_.begin()) return false;
      const auto& [start, id] = *std::prev(after);
      const std::uintptr_t end = start + handles_.at(id).bytes;
      if (at >= end || accessible_.at(start) != peers) return false;
      at = end;
    }
    return true;
  }

 private:
  struct Handle {
    int device;
    std::size_t bytes;
    std::uintptr_t address;  // 0: not mapped
  };
  struct Reserved {
    std::size_t bytes;
    void* raw;
    std::size_t raw_bytes;
  };

  mutable std::mutex mutex_;
  std::size_t capacity_bytes_ = 0;
  bool refuses_addresses_ = false;
  bool refuses_maps_ = false;
  std::size_t held_bytes_ = 0, peak_bytes_ = 0, created_ = 0, maps_ = 0, unmaps_ = 0;
  HandleId last_handle_ = 0;
  std::map<HandleId, Handle> handles_;
  std::map<std::uintptr_t, HandleId> mapped_;
  std::map<std::uintptr_t, std::set<int>> accessible_;
  std::map<int, std::set<int>> peers_;
  std::map<std::uintptr_t, Reserved> reserved_;
  std::function<void()> on_unmap_;
};

}  // namespace umem
