#include "core/host_virtual_memory.hpp"

#include <sys/mman.h>

namespace umem {
namespace {

constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// New pages, without access or zeroed, in the place of what was at the address; anywhere for 0.
std::uintptr_t fresh_pages(std::uintptr_t address, std::size_t bytes, int access) noexcept {
  void* pages = mmap(reinterpret_cast<void*>(address), bytes, access,
                     address == 0 ? kPrivate : kPrivate | MAP_FIXED, -1, 0);
  return pages == MAP_FAILED ? 0 : reinterpret_cast<std::uintptr_t>(pages);
}

void drop(std::uintptr_t from, std::uintptr_t to) noexcept {
  if (from != to) munmap(reinterpret_cast<void*>(from), to - from);
}

}  // namespace

std::uintptr_t HostVirtualMemory::reserve(int, std::size_t bytes, std::size_t alignment) noexcept {
  const std::uintptr_t begin = fresh_pages(0, bytes + alignment, PROT_NONE);
  if (begin == 0) return 0;
  const std::uintptr_t address = round_up(begin, alignment);
  drop(begin, address);
  drop(address + bytes, begin + bytes + alignment);
  return address;
}

void HostVirtualMemory::unreserve(Range range) noexcept {
  drop(range.address, range.address + range.bytes);
}

HandleId HostVirtualMemory::create(int, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (total_bytes_ != 0 && held_bytes_ + bytes > total_bytes_) return 0;
  handles_[++last_handle_] = bytes;
  held_bytes_ += bytes;
  return last_handle_;
}

void HostVirtualMemory::release(HandleId handle) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  held_bytes_ -= found->second;
  handles_.erase(found);
}

bool HostVirtualMemory::map(int, Range range, std::size_t, std::span<const HandleId>) noexcept {
  return fresh_pages(range.address, range.bytes, PROT_READ | PROT_WRITE) != 0;
}

void HostVirtualMemory::unmap(Range range, std::size_t) noexcept {
  fresh_pages(range.address, range.bytes, PROT_NONE);
}

}  // namespace umem
