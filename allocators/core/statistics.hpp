// Counters with the names of torch.cuda.memory_stats.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>

#include "core/types.hpp"

namespace umem {

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;  // sum of all increases
  std::int64_t freed = 0;      // sum of all decreases

  void increase(std::size_t amount) {
    current += static_cast<std::int64_t>(amount);
    peak = std::max(peak, current);
    allocated += static_cast<std::int64_t>(amount);
  }
  void decrease(std::size_t amount) {
    current -= static_cast<std::int64_t>(amount);
    freed += static_cast<std::int64_t>(amount);
  }
  void change(std::size_t amount, bool more) { more ? increase(amount) : decrease(amount); }
  void reset_peak() { peak = current; }
  void reset_accumulated() { allocated = freed = 0; }
};

// torch reports every figure for all blocks, for small ones and for large ones.
enum class Tier : std::uint8_t { small, large };

struct TieredStat {
  Stat all, small_pool, large_pool;

  void change(Tier tier, std::size_t amount, bool more) {
    all.change(amount, more);
    (tier == Tier::small ? small_pool : large_pool).change(amount, more);
  }
  void increase(Tier tier, std::size_t amount) { change(tier, amount, true); }
  void decrease(Tier tier, std::size_t amount) { change(tier, amount, false); }
  template <class F>
  void each(F&& f) {
    f(all), f(small_pool), f(large_pool);
  }
};

// What serves a request: a rung of the ladder (device_allocator_ladder.cpp).
enum class Rung : std::uint8_t {
  cached,          // a free block of its heap
  ended_alias,     // free memory of its heap that lay at other addresses
  spilled_before,  // page-locked memory that had been spilled, for a class that is page-locked
  mapped,          // new handles
  segment,         // a new segment
  taken_back,      // memory of its heap that other streams had borrowed
  alias,           // free memory of its heap in several places, at other addresses
  borrowed,        // free memory of another stream's heap
  room_made,       // new memory, for which cached memory was given back
  spilled,         // the host
  waited,          // a free block of its heap, after all pending events
};
inline constexpr std::size_t kRungs = 11;
inline constexpr std::array<const char*, kRungs> kRungNames = {
    "cached", "ended_alias", "spilled_before", "mapped",  "segment", "taken_back",
    "alias",  "borrowed",    "room_made",      "spilled", "waited"};

// Adds the time of its life.
class Stopwatch {
 public:
  explicit Stopwatch(std::int64_t& total_ns) : total_ns_(total_ns) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    const auto life = std::chrono::steady_clock::now() - began_;
    total_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(life).count();
  }

 private:
  std::int64_t& total_ns_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

struct ClassStats {
  Stat allocation, allocated_bytes, requested_bytes;

  template <class F>
  void each(F&& f) {
    f(allocation), f(allocated_bytes), f(requested_bytes);
  }
};

struct DeviceStats {
  TieredStat allocation;             // blocks of live tensors
  TieredStat segment;                // segments held from the sources
  TieredStat active;                 // allocated, or freed while another stream still uses them
  TieredStat inactive_split;         // cached blocks that share a segment with another block
  TieredStat allocated_bytes;        // block bytes, rounding included
  TieredStat reserved_bytes;         // segment bytes
  TieredStat active_bytes;
  TieredStat inactive_split_bytes;
  TieredStat requested_bytes;        // bytes as asked for
  Stat budget_bytes;                 // what counts against the device budget
  std::array<ClassStats, kClasses> by_class;
  std::array<std::int64_t, kRungs> served{};  // requests, by rung
  std::int64_t highest_bytes = 0;      // peak of allocated_bytes that is never reset
  std::int64_t locked_ahead_bytes = 0;  // page-locked before it was asked for; never reset
  std::int64_t uncached_ns = 0;        // of requests that the cache had no memory for; never reset
  std::int64_t num_alloc_retries = 0;  // the cache was freed to serve a request
  std::int64_t num_ooms = 0;
  std::int64_t num_device_alloc = 0;
  std::int64_t num_device_free = 0;
  std::int64_t num_sync_all_streams = 0;
  std::int64_t num_failed_hints = 0;  // advice or population that the driver refused

  template <class F>
  void each(F&& f) {
    for (TieredStat* stat :
         {&allocation, &segment, &active, &inactive_split, &allocated_bytes, &reserved_bytes,
          &active_bytes, &inactive_split_bytes, &requested_bytes})
      stat->each(f);
    f(budget_bytes);
    for (ClassStats& stats : by_class) stats.each(f);
  }
  void reset_peak() {
    each([](Stat& stat) { stat.reset_peak(); });
  }
  void reset_accumulated() {
    each([](Stat& stat) { stat.reset_accumulated(); });
    served.fill(0);
    num_alloc_retries = num_ooms = num_device_alloc = num_device_free = num_sync_all_streams =
        num_failed_hints = 0;
  }
};

}  // namespace umem
