// Requests that are made together, again and again: checked once, fired with one call.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "hints/request.hpp"

namespace umem {

// Consecutive tickets; none when `last` is below `first`.
struct TicketSpan {
  Ticket first = 1;
  Ticket last = 0;
};

// Thread-safe. Belongs to no engine: it holds what is asked, not what becomes of it.
class HintBatch {
 public:
  // All on one device. An address of 0 skips the entry until it is set. Throws
  // std::invalid_argument for what cannot be meant, copies and advice included.
  HintBatch(int device, std::vector<HintRequest> requests);
  HintBatch(const HintBatch&) = delete;
  HintBatch& operator=(const HintBatch&) = delete;

  int device() const { return device_; }
  std::size_t size() const { return requests_.size(); }
  // Entries that have an address. Takes no lock, which a forked child may find held for ever.
  std::size_t wanted() const noexcept { return wanted_; }
  // Throws std::out_of_range for an index that does not exist.
  void set_address(std::size_t index, std::uintptr_t address);
  // Of the last firing. An entry that was skipped has none.
  TicketSpan tickets() const;

  // Calls fire(requests) under the lock and keeps the tickets that it returns.
  template <class Fire>
  TicketSpan fire_with(Fire&& fire) {
    const std::lock_guard lock(mutex_);
    return tickets_ = fire(static_cast<const std::vector<HintRequest>&>(requests_));
  }

 private:
  const int device_;
  mutable std::mutex mutex_;
  std::vector<HintRequest> requests_;
  std::atomic<std::size_t> wanted_{0};
  TicketSpan tickets_;
};

}  // namespace umem
