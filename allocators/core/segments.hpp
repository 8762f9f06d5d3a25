// The books of a device's memory: its segments, and the blocks that they are divided into.
//
// Note [Splitting]
//
// A block is always split to the requested size, however small the remainder: allocated memory is
// the sum of the rounded requests, and a plan can rely on it. A remainder below 2 MiB serves no
// large request, and is merged again with the block before or after it when that is freed.
#pragma once

#include <iterator>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/block.hpp"
#include "core/heap.hpp"
#include "core/statistics.hpp"
#include "core/types.hpp"

namespace umem {

// Cached memory that can go back: a whole segment, or whole handles of a cached block.
struct Spare {
  Block* block;
  std::size_t bytes;
};

// A run of mapped handles.
struct Run {
  Heap* heap;
  Range range;
};

// What giving back free memory of a segment would free.
std::size_t spare_bytes(const Segment& segment, const Range& free);
std::size_t spare_bytes(const Block& block);

// By address. The blocks of a segment cover it, and no two cached ones are neighbours. Counts
// segments, and cached blocks that share one, in the statistics. Not thread-safe.
class Segments {
 public:
  explicit Segments(DeviceStats& stats) : stats_(stats) {}

  auto begin() { return segments_.begin(); }
  auto end() { return segments_.end(); }
  auto begin() const { return segments_.begin(); }
  auto end() const { return segments_.end(); }
  auto lower_bound(std::uintptr_t address) const { return segments_.lower_bound(address); }

  // nullptr: no live block starts there.
  Block* live_block(std::uintptr_t address);
  // The segment that holds an address.
  std::optional<Range> find(std::uintptr_t address) const;

  // Books a segment as one block, which is in no index.
  Block* add(const Segment& fresh);
  // Forgets a segment that is one block, which is in no index.
  void remove(Block* block);

  // Leaves `bytes` in a block that is in no index, and the rest in a cached block after it.
  void cut(Block* block, std::size_t bytes);
  // Caches a block together with the free ones beside it.
  void put_back(Block* block);
  void cache(Block* block);
  void uncache(Block* block);

  // Books mapped handles as a block that is in no index.
  Block* add_run(Heap& heap, const Range& mapped);
  // Books mapped handles as a cached block, together with what is free on both sides.
  void add_mapped(Heap& heap, const Range& mapped);
  // Forgets a block that is in no index: its run ends before it, and another one begins behind it.
  void remove_mapped(Block* block, const Range& gone);
  // Forgets whole handles of a cached block.
  void take_out(Block* block, const Range& gone);
  std::vector<Run> mapped_runs() const;

  // All cached memory that can go back and that no graph may use.
  std::vector<Spare> spares() const;
  // At most what giving back all spares would free on the device.
  std::size_t idle_device_bytes() const { return idle_device_bytes_; }
  std::size_t used_bytes(const Heap& heap) const;

 private:
  Block* split(Block* block, std::size_t bytes);
  Block* merge(Block* left, Block* right);
  void join(Segment& left, Segment& right);

  DeviceStats& stats_;
  std::unordered_map<std::uintptr_t, Block> blocks_;  // live, pending and cached
  std::map<std::uintptr_t, Segment> segments_;
  Block* first_spare_ = nullptr;  // of a list: looking for spares must not take long
  std::size_t idle_device_bytes_ = 0;
};

}  // namespace umem
