// Page-locked host memory: huge pages on the GPU's NUMA node, touched by many threads, then locked.
//
// Note [Page-locked memory]
//
// `cudaHostAlloc` has one thread fault in small pages, and takes ten times as long
// (docs/allocator.md). umem maps anonymous memory in huge pages (`MADV_HUGEPAGE`), on the GPU's
// NUMA node where the host lets it choose, has up to 16 threads touch segments from 64 MiB on, and
// then registers them (`cudaHostRegister`). There is no CUDA in it, so that mapping, touching and
// failing are tested natively.
//
// A child made by `fork` does not have this memory (`MADV_DONTFORK`): the kernel would copy locked
// pages into it, all of them at once.
#pragma once

#include <memory>

#include "core/types.hpp"

namespace umem {

// Locks mapped host memory for the GPUs. The CUDA side implements it; tests inject fakes.
class PageLocker {
 public:
  virtual ~PageLocker() = default;

  // False when the pages cannot be locked; then nothing is.
  virtual bool lock(Range range) noexcept = 0;
  // Returns when no GPU uses the range any more.
  virtual void unlock(Range range) noexcept = 0;
};

// Thread-safe.
class PinnedMemory {
 public:
  static constexpr int kAnyNode = -1;

  explicit PinnedMemory(std::unique_ptr<PageLocker> locker) : locker_(std::move(locker)) {}

  // Aligned to 2 MiB, zeroed; nullptr when the host refuses. `numa_node` is preferred where the
  // host lets a process choose. A forked child does not have the memory: fork would copy it.
  void* allocate(std::size_t bytes, int numa_node) noexcept;
  // `bytes` as allocated. Not in a forked child.
  void deallocate(void* address, std::size_t bytes) noexcept;

 private:
  std::unique_ptr<PageLocker> locker_;
};

}  // namespace umem
