// Requests that are submitted together repeatedly: checked once, submitted with one call.
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

// Thread-safe. Belongs to no engine: it holds requests, not their outcomes.
class HintBatch {
 public:
  // All on one device. An entry with address 0 is skipped until the address is set. Throws
  // std::invalid_argument for invalid requests, and for advice.
  HintBatch(int device, std::vector<HintRequest> requests);
  HintBatch(const HintBatch&) = delete;
  HintBatch& operator=(const HintBatch&) = delete;

  int device() const { return device_; }
  std::size_t size() const { return requests_.size(); }
  // Number of entries with an address. Lock-free: in a forked child a lock may stay held forever.
  std::size_t wanted() const noexcept { return wanted_; }
  // Throws std::out_of_range for an index that does not exist.
  void set_address(std::size_t index, std::uintptr_t address);
  // Tickets of the last submission. Skipped entries have none.
  TicketSpan tickets() const;

  // Calls submit(requests) under the lock and keeps the tickets that it returns.
  template <class Submit>
  TicketSpan submit_with(Submit&& submit) {
    const std::lock_guard lock(mutex_);
    return tickets_ = submit(static_cast<const std::vector<HintRequest>&>(requests_));
  }

 private:
  const int device_;
  mutable std::mutex mutex_;
  std::vector<HintRequest> requests_;
  std::atomic<std::size_t> wanted_{0};
  TicketSpan tickets_;
};

}  // namespace umem
