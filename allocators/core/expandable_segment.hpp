// Plain device memory of one heap that grows and shrinks: physical memory is mapped, in handles of
// one size, into an address range that is reserved once.
#pragma once

#include <memory>
#include <vector>

#include "core/driver.hpp"
#include "core/types.hpp"

namespace umem {

// Unmapped handles on their way to another address, all of `handle_bytes`.
struct MovingHandles {
  std::size_t handle_bytes = 0;
  std::vector<HandleId> handles;
};

class ExpandableSegment {
 public:
  // nullptr where the addresses cannot be reserved. They begin at a multiple of `handle_bytes`.
  static std::unique_ptr<ExpandableSegment> reserve(VirtualMemory& memory, int device,
                                                    std::size_t bytes, std::size_t handle_bytes);
  ExpandableSegment(const ExpandableSegment&) = delete;
  ExpandableSegment& operator=(const ExpandableSegment&) = delete;
  ~ExpandableSegment();  // gives back what is mapped

  const Range& addresses() const { return addresses_; }
  std::size_t handle_bytes() const { return handle_bytes_; }

  // The largest part of a range that consists of whole handles; 0 bytes where there is none.
  Range whole_handles(Range range) const;
  // Maps `range`, whole handles of which none is mapped: first those of `moving`, then new ones.
  // False where memory or the driver has no more; then nothing is mapped, and `moving` is empty.
  bool map(Range range, MovingHandles& moving);
  // Unmaps `range`, whole handles that are mapped and that no work uses. Handles of the size of
  // `moving` are added to it, others are given back.
  void unmap(Range range, MovingHandles& moving);

 private:
  ExpandableSegment(VirtualMemory& memory, int device, Range addresses, std::size_t handle_bytes)
      : memory_(memory), device_(device), addresses_(addresses), handle_bytes_(handle_bytes) {}
  std::size_t number_of(std::uintptr_t address) const {
    return (address - addresses_.address) / handle_bytes_;
  }

  VirtualMemory& memory_;
  const int device_;
  const Range addresses_;
  const std::size_t handle_bytes_;
  std::vector<HandleId> handles_;  // by their place in the range; 0: not mapped
};

// Gives handles that found no place back to the driver.
void release(VirtualMemory& memory, MovingHandles& moving);

}  // namespace umem
