// What limits the memory of a device: its budget, a fraction of it that torch sets, and the caps of
// the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "core/heap.hpp"
#include "core/statistics.hpp"
#include "core/types.hpp"

namespace umem {

// A cap on the bytes of one kind of memory, shared by the devices of the process. 0: no cap.
class SharedLimit {
 public:
  explicit SharedLimit(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  bool take(std::size_t bytes) {
    const std::size_t limit = limit_bytes_.load();
    std::size_t held = held_bytes_.load();
    do {
      if (limit != 0 && (bytes > limit || held > limit - bytes)) return false;
    } while (!held_bytes_.compare_exchange_weak(held, held + bytes));
    return true;
  }
  void give_back(std::size_t bytes) { held_bytes_.fetch_sub(bytes); }
  void raise(std::size_t bytes) { limit_bytes_.fetch_add(bytes); }
  // From now on, so many bytes more than are held; what is held stays.
  void set_room(std::size_t bytes) {
    limit_bytes_.store(std::max<std::size_t>(held_bytes_.load() + bytes, 1));
  }
  std::size_t held_bytes() const { return held_bytes_.load(); }
  std::size_t limit_bytes() const { return limit_bytes_.load(); }

 private:
  std::atomic<std::size_t> limit_bytes_;
  std::atomic<std::size_t> held_bytes_{0};
};

struct SharedLimits {
  SharedLimit managed;
  SharedLimit pinned;

  SharedLimit* of(MemoryKind kind) {  // nullptr: this kind has none
    switch (kind) {
      case MemoryKind::managed:
        return &managed;
      case MemoryKind::pinned:
        return &pinned;
      case MemoryKind::device:
      case MemoryKind::system:
        return nullptr;
    }
    return nullptr;
  }
};

enum class Limit : std::uint8_t { source, managed, pinned, device_budget, memory_fraction };

// Why a request could not be served, for the error's text.
struct Shortage {
  Limit limit = Limit::source;  // the last one that was met
  bool over_budget = false;     // the request was to be served from the host
};

// Counts what is on the device in `held`, which its users change too. Not thread-safe.
class Budget {
 public:
  Budget(std::size_t limit_bytes, Stat& held, SharedLimits& shared)
      : limit_bytes_(limit_bytes), held_(held), shared_(shared) {}

  std::size_t limit_bytes() const { return limit_bytes_; }  // 0: no budget
  void set_limit(std::size_t bytes) { limit_bytes_ = bytes; }
  double fraction() const { return fraction_; }
  void set_fraction(double fraction) { fraction_ = fraction; }

  // By how much `more_bytes` on the device would exceed the budget.
  std::size_t excess_bytes(std::size_t more_bytes) const;
  // Whether so much new memory for a heap would.
  bool excludes(const Heap& heap, std::size_t bytes) const {
    return heap.on_device && excess_bytes(bytes) != 0;
  }
  // Counts new memory of a heap against the caps of the process, or returns the limit that it would
  // exceed. The bytes of the device and what umem holds of them matter below a fraction of 1.
  std::optional<Limit> take(const Heap& heap, std::size_t bytes, std::size_t total_bytes,
                            std::size_t reserved_bytes);
  void give_back(MemoryKind kind, std::size_t bytes) {
    if (SharedLimit* limit = shared_.of(kind)) limit->give_back(bytes);
  }

  // Page tables on the device of page-locked memory: of others, and of so many bytes of umem's.
  void add_locked_by_others(std::ptrdiff_t bytes) { others_locked_bytes_ += bytes; }
  std::size_t page_table_bytes(std::size_t locked_bytes) const;
  std::size_t page_table_bytes() const { return page_table_bytes_; }
  void set_page_table_bytes(std::size_t bytes);

 private:
  std::size_t limit_bytes_;
  Stat& held_;
  SharedLimits& shared_;
  double fraction_ = 1.0;
  std::size_t page_table_bytes_ = 0;
  std::ptrdiff_t others_locked_bytes_ = 0;
};

}  // namespace umem
