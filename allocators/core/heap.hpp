// Heaps: the cached blocks of one stream that may serve the same requests.
//
// Note [Heaps]
//
// A block that is used again on the stream that freed it needs no event, and so the cache is fast.
// Blocks of 2 MiB or more own their pages, so a heap of them need not belong to one class: all
// classes with one profile share it. Gradients use the memory that activations gave back, as in
// torch's cache, and a step reserves the peak of all its tensors together, not the sum of the
// peaks of each class. Smaller blocks do share pages, so each class has its own slabs, but for
// plain device memory, which never moves. When a block passes to a class whose advice differs, it
// is advised again; merged neighbours under different advice are advised at their next use.
#pragma once

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/block.hpp"
#include "core/expandable_segment.hpp"
#include "core/free_index.hpp"
#include "core/types.hpp"

namespace umem {

// The kind of a heap's segments, and the advice that they get.
struct Profile {
  MemoryKind kind = MemoryKind::managed;
  Advice advice;

  bool operator==(const Profile&) const = default;
};

constexpr bool takes_advice(MemoryKind kind) {
  return kind == MemoryKind::managed || kind == MemoryKind::system;
}

constexpr bool resides_on_device(const Profile& profile) {
  switch (profile.kind) {
    case MemoryKind::device:
      return true;
    case MemoryKind::managed:
    case MemoryKind::system:
      return profile.advice.placement != Placement::host;
    case MemoryKind::pinned:
      return false;
  }
  return false;
}

// Granularity of blocks of a tier, in size and address.
constexpr std::size_t step_bytes(Tier tier) {
  return tier == Tier::small ? kMinBlockBytes : kLargeStepBytes;
}

// The heaps of one stream or pool by number: one for each route.
struct Route {
  std::uint8_t profile;  // number, see Routes
  Tier tier;

  bool operator==(const Route&) const = default;
};

// Of Heap::patience: many steps of a training.
inline constexpr std::uint32_t kLeastPatience = 1U << 16, kMostPatience = 1U << 30;

struct Pool;

struct Heap {
  Heap(const Route& route, const Profile& profile, StreamId stream, Pool* pool)
      : profile(route.profile),
        kind(profile.kind),
        on_device(resides_on_device(profile)),
        tier(route.tier),
        stream(stream),
        pool(pool),
        index(step_bytes(tier)) {}

  const std::uint8_t profile;  // number, see Routes
  const MemoryKind kind;
  const bool on_device;
  const Tier tier;
  const StreamId stream;
  Pool* const pool;  // nullptr: not private
  FreeIndex index;
  std::unique_ptr<ExpandableSegment> expandable;  // nullptr: segments are the source's
  std::vector<Block*> free_aliases;  // not in the index: smaller requests would keep them alive
  std::vector<Block*> free_borrowed;  // of other streams' segments; not in the index either
  // Of aliases before they ended, by address; 0: that work has finished.
  std::unordered_map<std::uintptr_t, EventId> last_uses;

  // See Note [Steady steps] in device_allocator_room.cpp.
  bool lent = false;
  std::uint32_t patience = 0;
  std::uint32_t turned_away = 0;
  std::uint32_t in_vain = 0;  // requests for which no room was made, see room_was_in_vain()

  bool pool_in_use() const;  // a graph may write to its memory at every replay, freed or not

  void grow_patient() {  // it needs new memory
    if (!lent) return;
    lent = false;
    turned_away = 0;
    patience = std::clamp(2 * patience, kLeastPatience, kMostPatience);
  }
};

// The heaps of one stream, by the number of their route, made when first used.
using StreamHeaps = std::vector<std::unique_ptr<Heap>>;

// A private pool: allocations of a captured graph stay reserved until the graph is destroyed.
struct Pool {
  PoolId id;
  std::size_t users = 0;  // begin_pool calls less release_pool calls; 0: its cache may go
  std::size_t segments = 0;
  std::size_t reserved_bytes = 0;
  std::size_t allocated_bytes = 0;
  std::unordered_map<StreamId, StreamHeaps> heaps;
};

// The heap whose stream may use a block: the borrower's.
inline const Heap& user_of(const Block& block) {
  return block.borrower != nullptr ? *block.borrower : *block.segment->heap;
}

inline bool Heap::pool_in_use() const { return pool != nullptr && pool->users > 0; }

}  // namespace umem
