#include "core/host_copy.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "core/device_allocator.hpp"

namespace umem {
namespace {

// Page-locking has a cost for each call, and what a limit or the host refuses is pageable.
constexpr std::size_t kChunkBytes = std::size_t{256} << 20;

}  // namespace

HostCopy::~HostCopy() {
  for (const Chunk& chunk : chunks_) {
    if (chunk.is_pinned) {
      source_.deallocate(MemoryKind::pinned, device_, chunk.memory, chunk.bytes);
      pinned_limit_.give_back(chunk.bytes);
    } else {
      std::free(chunk.memory);
    }
  }
}

void* HostCopy::allocate_pinned(std::size_t bytes) {
  if (!pinned_limit_.take(bytes)) return nullptr;
  void* memory = nullptr;
  try {
    memory = source_.allocate(MemoryKind::pinned, device_, bytes);
  } catch (...) {
    pinned_limit_.give_back(bytes);
    throw;
  }
  if (memory == nullptr) pinned_limit_.give_back(bytes);
  return memory;
}

bool HostCopy::allocate(std::size_t bytes) {
  while (bytes_ < bytes) {
    Chunk chunk{nullptr, std::min(kChunkBytes, bytes - bytes_), true};
    chunk.memory = allocate_pinned(chunk.bytes);
    if (chunk.memory == nullptr) {
      chunk.is_pinned = false;
      chunk.memory = std::malloc(chunk.bytes);
      if (chunk.memory == nullptr) return false;
    }
    chunks_.push_back(chunk);
    bytes_ += chunk.bytes;
  }
  return true;
}

bool HostCopy::save(Range range) {
  while (range.bytes != 0) {
    const Chunk& chunk = chunks_[chunk_];
    const Range part{range.address, std::min(range.bytes, chunk.bytes - used_bytes_)};
    const std::uintptr_t host = reinterpret_cast<std::uintptr_t>(chunk.memory) + used_bytes_;
    if (!driver_.copy(device_, host, part.address, part.bytes)) return false;
    parts_.push_back({part, host});
    used_bytes_ += part.bytes;
    if (used_bytes_ == chunk.bytes) {
      ++chunk_;
      used_bytes_ = 0;
    }
    range = {range.address + part.bytes, range.bytes - part.bytes};
  }
  return true;
}

bool HostCopy::restore(Range range) const {
  return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    const std::uintptr_t from = std::max(part.range.address, range.address);
    const std::uintptr_t to =
        std::min(part.range.address + part.range.bytes, range.address + range.bytes);
    return from >= to ||
           driver_.copy(device_, from, part.host + (from - part.range.address), to - from);
  });
}

std::size_t HostCopy::pinned_bytes() const {
  return std::accumulate(chunks_.begin(), chunks_.end(), std::size_t{0},
                         [](std::size_t bytes, const Chunk& chunk) {
                           return bytes + (chunk.is_pinned ? chunk.bytes : 0);
                         });
}

}  // namespace umem
