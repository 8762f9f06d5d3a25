// Types of the allocator's core: tensor classes, kinds of memory, advice, limits.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace umem {

// The tensor class of a block. The order is that of umem.TensorClass (umem/core/classes.py).
enum class TensorClass : std::uint8_t {
  weights,
  frozen_weights,
  gradients,
  optimizer_state,
  activations,
  other
};
inline constexpr std::size_t kClasses = 6;
inline constexpr std::array<const char*, kClasses> kClassNames = {
    "weights", "frozen_weights", "gradients", "optimizer_state", "activations", "other"};

// Where a segment's bytes come from; each is one RMM resource.
enum class MemoryKind : std::uint8_t { managed, device, system, pinned };
inline constexpr std::size_t kKinds = 4;
inline constexpr std::array<const char*, kKinds> kKindNames = {"managed", "device", "system",
                                                               "pinned"};

// The preferred location for the driver's advice; `any` leaves the choice to the driver.
enum class Placement : std::uint8_t { device, host, any };

// Advice for a range of managed memory.
struct Advice {
  Placement placement = Placement::any;
  bool accessed_by_device = false;
  bool read_mostly = false;

  bool operator==(const Advice&) const = default;
};

// The preferred location of a range with this advice. Read-mostly pages never prefer the device:
// when read-mostly advice is withdrawn, the driver keeps the copy at the preferred location, or
// else the host's copy, so that the device's copies are dropped without a transfer.
constexpr Placement preferred_location(const Advice& advice) {
  return advice.read_mostly && advice.placement == Placement::device ? Placement::any
                                                                     : advice.placement;
}

// One tensor class's rule, as a policy resolves it.
struct ClassSetting {
  MemoryKind kind = MemoryKind::managed;
  Advice advice{.placement = Placement::device};
  std::size_t min_bytes = 0;  // smaller blocks come from plain device memory
};

struct Config {
  std::array<ClassSetting, kClasses> classes{};
  std::size_t managed_limit_bytes = 0;    // 0: no cap, unless devices have one
  // By device: added to the cap once the process allocates on it. Empty: devices add nothing.
  std::vector<std::size_t> managed_bytes_of_device{};
  std::size_t pinned_limit_bytes = 0;     // most page-locked host memory; 0: no limit
  std::size_t device_budget_bytes = 0;    // 0: no budget
  std::size_t system_headroom_bytes = 0;  // device bytes that kind `system` leaves free
  bool advises = true;                    // false: as with a driver that takes no advice
  bool prefetches = true;                 // false: as with one that moves no pages when asked
  bool poisons = false;                   // overwrite what is freed, and what is handed out
};

using StreamId = std::uint64_t;  // a cudaStream_t; 0 is the default stream of each device
using EventId = std::uint64_t;   // 0: no event
using HandleId = std::uint64_t;  // physical memory that can be mapped; 0: none
using PoolId = std::pair<unsigned long long, unsigned long long>;  // torch's MempoolId_t

// The device matters for the default stream only: any other has a number of its own.
struct DeviceStream {
  int device = 0;
  StreamId stream = 0;

  auto operator<=>(const DeviceStream&) const = default;
};

struct Range {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
};

struct MemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

// Thrown when limits or sources cannot serve an allocation. what() starts with the words by which
// accelerate and Lightning recognise an out-of-memory.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown when a device cannot be paused or resumed, or by an allocation on one that is paused. Not
// an OutOfMemory: programs answer that with a smaller batch.
class PauseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What poisoned memory has: NaN as any floating-point number.
inline constexpr unsigned char kPoison = 0xFF;

// 2 MiB is the driver's largest migration block and a GPU's large page. Segments that blocks are
// cut from are multiples of it, and requests from here on get blocks that move alone.
inline constexpr std::size_t kPageBytes = std::size_t{2} << 20;
// Those blocks begin and end on multiples of this. It is the largest page by which the driver keeps
// track of where memory is (4 KiB on x86 hosts, 64 KiB on GH200), so that advice and migration
// do not affect adjacent blocks. Blocks of whole kPageBytes move no faster (docs/allocator.md).
inline constexpr std::size_t kLargeStepBytes = std::size_t{64} << 10;
// torch promises 512-byte alignment; some kernels rely on it.
inline constexpr std::size_t kMinBlockBytes = 512;

constexpr std::size_t round_up(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

}  // namespace umem
