// Contents of device memory, kept in host memory.
#pragma once

#include <vector>

#include "core/driver.hpp"
#include "core/types.hpp"

namespace umem {

class SharedLimit;

class HostCopy {
 public:
  HostCopy(int device, SegmentSource& source, Driver& driver, SharedLimit& pinned_limit)
      : device_(device), source_(source), driver_(driver), pinned_limit_(pinned_limit) {}
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;
  ~HostCopy();  // frees the host memory

  // Page-locked memory as far as it can be had, else pageable memory. False where the host has no
  // more; then what was allocated is freed with this object.
  bool allocate(std::size_t bytes);
  // Copies a range of device memory into allocated memory, behind what was saved before.
  bool save(Range range);
  // Copies back into `range` what was saved of it.
  bool restore(Range range) const;

  std::size_t bytes() const { return bytes_; }
  std::size_t pinned_bytes() const;

 private:
  struct Chunk {
    void* memory;
    std::size_t bytes;
    bool is_pinned;
  };
  struct Part {
    Range range;  // on the device
    std::uintptr_t host;
  };

  void* allocate_pinned(std::size_t bytes);

  const int device_;
  SegmentSource& source_;
  Driver& driver_;
  SharedLimit& pinned_limit_;
  std::vector<Chunk> chunks_;
  std::size_t bytes_ = 0;        // of all chunks
  std::size_t chunk_ = 0;        // that is filled next
  std::size_t used_bytes_ = 0;   // of that chunk
  std::vector<Part> parts_;
};

}  // namespace umem
