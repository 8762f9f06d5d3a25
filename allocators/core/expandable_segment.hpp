// Plain device memory of one heap that grows and shrinks: physical memory is mapped, in handles of
// one size, into an address range that is reserved once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/driver.hpp"
#include "core/types.hpp"

namespace umem {

// Unmapped handles on their way to another address, all of `handle_bytes`.
struct MovingHandles {
  std::size_t handle_bytes = 0;
  std::vector<HandleId> handles;
};

// What takes about as long as another: mapping a handle, unmapping one, and the time in which the
// device runs dry because work was waited for.
inline constexpr std::size_t kMapCost = 2, kUnmapCost = 1, kWaitCost = 128;

// Handles of free memory that are to lie side by side at other addresses.
struct AliasPlan {
  std::size_t first = 0;             // place of the first one there
  std::vector<std::size_t> sources;  // places now, in the order of their places there
  std::size_t cost = 0;
  bool unmaps = false;               // something else is mapped there, which no work may use
};

// A place is a part of the addresses that one handle fills. The first ones are for growth, the
// others for aliases: places at which handles are mapped a second time, so that free memory between
// tensors serves a large request at once (Note [Aliases] in mapped_memory.hpp). A handle is owned at
// one place, and what is mapped elsewhere (a shadow) is not used meanwhile.
class ExpandableSegment {
 public:
  // nullptr where the addresses cannot be reserved. They begin at a multiple of `handle_bytes`.
  static std::unique_ptr<ExpandableSegment> reserve(VirtualMemory& memory, int device,
                                                    std::size_t growth_bytes,
                                                    std::size_t alias_bytes,
                                                    std::size_t handle_bytes);
  ExpandableSegment(const ExpandableSegment&) = delete;
  ExpandableSegment& operator=(const ExpandableSegment&) = delete;
  ~ExpandableSegment();  // gives back what is mapped

  // For growth. The place behind them is empty: no run reaches into the aliases.
  Range addresses() const { return range_of(0, first_alias_ - 1); }
  std::size_t handle_bytes() const { return handle_bytes_; }
  // The largest part of a range that consists of whole handles; 0 bytes where there is none.
  Range whole_handles(Range range) const;
  // Maps `range`, whole handles of which none is owned: first those of `moving`, then new ones.
  // False where memory or the driver has no more; then nothing is owned, and `moving` is empty.
  // No work may use the shadows there.
  bool map(Range range, MovingHandles& moving);
  // Unmaps `range`, whole handles that are owned and that no work uses, and their shadows. Handles
  // of the size of `moving` are added to it, others are given back.
  void unmap(Range range, MovingHandles& moving);
  std::size_t shadow_bytes(Range range) const;
  // All that is mapped.
  void append_mapped(std::vector<Range>& to) const;

  // How to put `count` of the owned handles in `free` side by side at the least cost. Other handles
  // are mapped in the place of shadows at an address that `is_busy` behind a wait only. Nothing where
  // handles are too few, or where the addresses are used up.
  std::optional<AliasPlan> plan_alias(std::size_t count, const std::vector<Range>& free,
                                      const std::function<bool(std::uintptr_t)>& is_busy) const;
  Range alias_range(const AliasPlan& plan) const {
    return range_of(plan.first, plan.sources.size());
  }
  // Of each range in `free`, what the plan takes; by address, as `free` is.
  std::vector<Range> sources_of(const AliasPlan& plan, const std::vector<Range>& free) const;
  // False where the driver refuses: then the handles are owned where they were.
  bool map_alias(const AliasPlan& plan);
  // Owns the handles of an alias where they were before. Returns where they are, adjacent ones as
  // one range: at the alias still, if their place has another handle by now.
  std::vector<Range> end_alias(Range alias);
  // The alias is memory like any other from now on.
  void keep_alias(Range alias);

 private:
  struct Place {
    HandleId owned = 0, shadow = 0;  // 0: none
  };
  struct Handle {
    std::size_t place = 0;  // where it is owned
    std::vector<std::size_t> shadows;
  };
  struct Alias {
    std::size_t first = 0;
    std::size_t count = 0;           // of places
    std::vector<std::size_t> homes;  // of the handles there; empty: it has ended
  };

  ExpandableSegment(VirtualMemory& memory, int device, Range addresses, std::size_t growth_bytes,
                    std::size_t handle_bytes)
      : memory_(memory),
        device_(device),
        addresses_(addresses),
        handle_bytes_(handle_bytes),
        first_alias_(growth_bytes / handle_bytes + 1),
        end_of_aliases_(first_alias_) {}
  std::size_t number_of(std::uintptr_t address) const {
    return (address - addresses_.address) / handle_bytes_;
  }
  Range range_of(std::size_t first, std::size_t count) const {
    return {addresses_.address + first * handle_bytes_, count * handle_bytes_};
  }
  std::vector<Range> ranges_of(std::vector<std::size_t> places) const;
  void own(std::size_t place, HandleId handle);
  void leave(std::size_t place);
  void forget_shadow(std::size_t place);
  void unmap_shadow(std::size_t place);
  std::size_t first_gap(std::size_t count) const;
  std::optional<AliasPlan> cheapest_alias(
      std::size_t count, const std::vector<bool>& is_free,
      const std::function<bool(std::uintptr_t)>& is_busy) const;

  VirtualMemory& memory_;
  const int device_;
  const Range addresses_;
  const std::size_t handle_bytes_;
  const std::size_t first_alias_;  // place
  std::size_t end_of_aliases_;     // behind the last one so far
  std::vector<Place> places_;
  std::unordered_map<HandleId, Handle> handles_;
  std::vector<Alias> aliases_;
};

// Gives handles that found no place back to the driver.
void release(VirtualMemory& memory, MovingHandles& moving);

}  // namespace umem
