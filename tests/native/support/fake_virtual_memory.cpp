#include "fake_virtual_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

namespace umem {

FakeVirtualMemory::~FakeVirtualMemory() {
  CHECK_EQUAL(handles_.size(), 0U);  // a handle that nobody released
  CHECK_EQUAL(reserved_.size(), 0U);
}

std::uintptr_t FakeVirtualMemory::reserve(int, std::size_t bytes, std::size_t alignment) noexcept {
  slow.enter("reserve");
  const std::lock_guard lock(mutex_);
  if (faults_->fails() || refuses_addresses_) return 0;
  const std::size_t mapped_bytes = bytes + alignment;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(mapped != MAP_FAILED);
  const std::uintptr_t address = round_up(reinterpret_cast<std::uintptr_t>(mapped), alignment);
  reserved_[address] = {bytes, mapped, mapped_bytes};
  return address;
}

void FakeVirtualMemory::unreserve(Range range) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = reserved_.find(range.address);
  CHECK(found != reserved_.end());
  CHECK_EQUAL(found->second.bytes, range.bytes);
  const auto inside = mapped_.lower_bound(range.address);
  CHECK(inside == mapped_.end() || inside->first >= range.address + range.bytes);
  munmap(found->second.raw, found->second.raw_bytes);
  reserved_.erase(found);
}

HandleId FakeVirtualMemory::create(int device, std::size_t bytes) noexcept {
  slow.enter("create");
  const std::lock_guard lock(mutex_);
  if (faults_->fails()) return 0;
  if (capacity_bytes_ != 0 && held_bytes_ + bytes > capacity_bytes_) return 0;
  handles_[++last_handle_] = {device, bytes, 0};
  held_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  ++created_;
  return last_handle_;
}

void FakeVirtualMemory::release(HandleId id) noexcept {
  slow.enter("release");
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(id);
  CHECK(found != handles_.end());
  CHECK_EQUAL(found->second.mappings, 0U);
  held_bytes_ -= found->second.bytes;
  handles_.erase(found);
}

bool FakeVirtualMemory::map(int device, std::span<const Range> ranges, std::size_t handle_bytes,
                            std::span<const HandleId> handles) noexcept {
  slow.enter("map");
  const std::lock_guard lock(mutex_);
  if (faults_->fails() || refuses_maps_) return false;
  auto id = handles.begin();
  for (const Range& range : ranges) {
    const auto home = std::prev(reserved_.upper_bound(range.address));
    CHECK(range.address + range.bytes <= home->first + home->second.bytes);
    CHECK_EQUAL(range.address % handle_bytes, 0U);
    CHECK_EQUAL(range.bytes % handle_bytes, 0U);
    for (std::size_t offset = 0; offset < range.bytes; offset += handle_bytes, ++id) {
      CHECK(id != handles.end());
      Handle& handle = handles_.at(*id);
      CHECK_EQUAL(handle.device, device);
      CHECK_EQUAL(handle.bytes, handle_bytes);
      ++handle.mappings;
      const std::uintptr_t address = range.address + offset;
      CHECK(mapped_.emplace(address, *id).second);
      accessible_[address] = peers_[device];
    }
  }
  ++maps_;
  return true;
}

void FakeVirtualMemory::unmap(Range range, std::size_t handle_bytes) noexcept {
  slow.enter("unmap");
  const std::lock_guard lock(mutex_);
  for (std::size_t offset = 0; offset < range.bytes; offset += handle_bytes) {
    const auto found = mapped_.find(range.address + offset);
    CHECK(found != mapped_.end());
    CHECK_EQUAL(handles_.at(found->second).bytes, handle_bytes);
    --handles_.at(found->second).mappings;
    accessible_.erase(found->first);
    mapped_.erase(found);
  }
  ++unmaps_;
  if (on_unmap_) on_unmap_();
}

bool FakeVirtualMemory::add_peer(int device, int peer, std::span<const Range> mapped) noexcept {
  slow.enter("add_peer");
  const std::lock_guard lock(mutex_);
  if (refuses_peers_) return false;
  peers_[device].insert(peer);
  for (const Range& range : mapped)
    for (auto at = accessible_.lower_bound(range.address);
         at != accessible_.end() && at->first < range.address + range.bytes; ++at)
      at->second.insert(peer);
  return true;
}

FakeVirtualMemory::Mapping FakeVirtualMemory::mapping_at(std::uintptr_t address) const {
  const std::lock_guard lock(mutex_);
  const auto after = mapped_.upper_bound(address);
  if (after == mapped_.begin()) return {};
  const auto& [start, id] = *std::prev(after);
  return address < start + handles_.at(id).bytes ? Mapping{id, start} : Mapping{};
}

bool FakeVirtualMemory::holds(std::uintptr_t address, std::size_t bytes,
                              const std::set<int>& peers) const {
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

}  // namespace umem
