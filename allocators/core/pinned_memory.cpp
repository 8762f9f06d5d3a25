#include "core/pinned_memory.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <thread>

#include "core/host_mapping.hpp"

namespace umem {
namespace {

constexpr std::size_t kMostThreads = 16;
constexpr std::size_t kLeastTouchedBytes = std::size_t{64} << 20;  // below, threads cost too much

// Pages of the range come from this node, as long as it has any. The kernel's call, because
// libnuma may not be installed. A refusal (a container, a node of another set) costs speed only.
void prefer_node(Range range, int node) noexcept {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr std::size_t kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> nodes{};
  if (node < 0 || static_cast<std::size_t>(node) >= nodes.size() * kWordBits) return;
  const auto bit = static_cast<std::size_t>(node);
  nodes[bit / kWordBits] = 1UL << (bit % kWordBits);
  syscall(SYS_mbind, range.address, range.bytes, kPreferred, nodes.data(),
          nodes.size() * kWordBits, 0);
}

void touch(Range range, std::size_t step_bytes) noexcept {
  for (std::size_t offset = 0; offset < range.bytes; offset += step_bytes)
    *reinterpret_cast<volatile char*>(range.address + offset) = 0;
}

// Faults in all pages, each thread a contiguous part: zeroing them takes most of the time.
void touch_with_threads(Range range) noexcept {
  const std::size_t page_bytes = mapped_bytes(1);
  const std::size_t parts =
      std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kMostThreads);
  const std::size_t part_bytes = round_up((range.bytes + parts - 1) / parts, kPageBytes);
  std::array<std::thread, kMostThreads> threads;
  std::size_t count = 0, offset = 0;
  try {
    for (; offset + part_bytes < range.bytes; offset += part_bytes)
      threads[count++] = std::thread(touch, Range{range.address + offset, part_bytes}, page_bytes);
  } catch (const std::exception&) {  // no more threads: this one touches the rest
  }
  touch({range.address + offset, range.bytes - offset}, page_bytes);
  for (std::thread& thread : threads)
    if (thread.joinable()) thread.join();
}

}  // namespace

void* PinnedMemory::allocate(std::size_t bytes, int numa_node) noexcept {
  const Range range = map_host(bytes);
  if (range.bytes == 0) return nullptr;
  void* address = reinterpret_cast<void*>(range.address);
  // fork must neither copy locked pages into a child, which takes as long as copying all of them,
  // nor mark them for copying, which would part the program's pages from the GPU's.
  if (madvise(address, range.bytes, MADV_DONTFORK) != 0) {
    unmap_host(range);
    return nullptr;
  }
  madvise(address, range.bytes, MADV_HUGEPAGE);  // refused on hosts without huge pages
  prefer_node(range, numa_node);
  if (range.bytes >= kLeastTouchedBytes) touch_with_threads(range);
  if (!locker_->lock(range)) {
    unmap_host(range);
    return nullptr;
  }
  return address;
}

void PinnedMemory::deallocate(void* address, std::size_t bytes) noexcept {
  const Range range{reinterpret_cast<std::uintptr_t>(address), mapped_bytes(bytes)};
  locker_->unlock(range);
  unmap_host(range);
}

}  // namespace umem
