#include "core/host_virtual_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace umem {
namespace {

constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Addresses without access in the place of what was at the address; anywhere for 0.
std::uintptr_t closed_pages(std::uintptr_t address, std::size_t bytes) noexcept {
  void* pages = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                     address == 0 ? kPrivate : kPrivate | MAP_FIXED, -1, 0);
  return pages == MAP_FAILED ? 0 : reinterpret_cast<std::uintptr_t>(pages);
}

void drop(std::uintptr_t from, std::uintptr_t to) noexcept {
  if (from != to) munmap(reinterpret_cast<void*>(from), to - from);
}

}  // namespace

HostVirtualMemory::HostVirtualMemory(std::size_t total_bytes)
    : total_bytes_(total_bytes), file_(memfd_create("umem", MFD_CLOEXEC)) {}

HostVirtualMemory::~HostVirtualMemory() { close(file_); }

std::uintptr_t HostVirtualMemory::reserve(int, std::size_t bytes, std::size_t alignment) noexcept {
  const std::uintptr_t begin = closed_pages(0, bytes + alignment);
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
  if (ftruncate(file_, static_cast<off_t>(file_bytes_ + bytes)) != 0) return 0;
  const HandleId handle = file_bytes_ + 1;
  handles_[handle] = bytes;
  file_bytes_ += bytes;
  held_bytes_ += bytes;
  return handle;
}

void HostVirtualMemory::release(HandleId handle) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  held_bytes_ -= found->second;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(handle - 1),
            static_cast<off_t>(found->second));
  handles_.erase(found);
}

bool HostVirtualMemory::map(int, std::span<const Range> ranges, std::size_t handle_bytes,
                            std::span<const HandleId> handles) noexcept {
  auto handle = handles.begin();
  for (const Range& range : ranges)
    for (std::size_t offset = 0; offset < range.bytes; offset += handle_bytes, ++handle)
      if (mmap(reinterpret_cast<void*>(range.address + offset), handle_bytes,
               PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
               static_cast<off_t>(*handle - 1)) == MAP_FAILED) {
        for (const Range& it : ranges) closed_pages(it.address, it.bytes);
        return false;
      }
  return true;
}

void HostVirtualMemory::unmap(Range range, std::size_t) noexcept {
  closed_pages(range.address, range.bytes);
}

}  // namespace umem
