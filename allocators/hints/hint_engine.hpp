// Moves managed memory ahead of need from its own threads.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/driver.hpp"
#include "hints/hint_batch.hpp"
#include "hints/hint_driver.hpp"
#include "hints/statistics.hpp"

namespace umem {

class HintWorkers;

// Thread-safe. An error of a driver call stays inside the engine: it is counted, reported once on
// stderr, and the next request is served. In a forked child every request is refused, and no call
// waits.
class HintEngine {
 public:
  // Throws std::invalid_argument for invalid settings. Threads start with the first request.
  HintEngine(const HintSettings& settings, std::unique_ptr<HintDriver> driver);
  ~HintEngine();
  HintEngine(const HintEngine&) = delete;
  HintEngine& operator=(const HintEngine&) = delete;

  // Starts the threads now and opens `device` in each: making a context takes long.
  void start(int device);

  // Accepts a request, in the order of calls, without a driver call. 0 if the queue is full or the
  // engine has stopped. Throws std::invalid_argument for an invalid request.
  Ticket submit(const HintRequest& request);
  // Submits all entries of the batch that have an address. They wait for the current work of
  // `stream`. One driver call, one lock. A full queue refuses the last entries. `after` is empty,
  // or has the HintRequest::after of each entry; throws std::invalid_argument for another length.
  TicketSpan submit_batch(HintBatch& batch, StreamId stream, std::span<const Ticket> after = {});
  // The phase that needs the requests begins now. Tickets of 0 are ignored.
  void mark_needed(std::vector<Ticket> tickets);

  // Drops queued parts of the range, and waits for driver calls on it. After `true` the memory may
  // be unmapped or reused; `false` after a timeout.
  bool forget(Range range, std::int64_t timeout_ns);
  // Forgets ranges that an allocator releases. Outlives the engine, and does nothing in a forked
  // child.
  std::shared_ptr<ReleaseListener> release_listener() const;

  // The outcome, `open` after a timeout; nothing for a ticket that is not on record.
  std::optional<Outcome> wait(Ticket ticket, std::int64_t timeout_ns);
  // The outcome of a request that has ended; nothing for others. Lock-free.
  std::optional<Outcome> ended(Ticket ticket) const noexcept;
  HintStatistics statistics();

  // Waits for running calls, drops the rest, ends the threads. False if a call did not end in time:
  // its thread is detached, and the destructor does not wait for it again. Later calls do nothing.
  bool shutdown(std::int64_t timeout_ns);

  // For the fork guard, in a child, where the threads do not exist.
  void abandon() noexcept;

 private:
  // Relaxed: it changes in a child that has one thread.
  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  std::shared_ptr<HintWorkers> workers_;  // shared with the threads, which may outlive the engine
  std::atomic<bool> forked_{false};
  std::atomic<bool> shut_down_{false};  // the destructor has nothing left to do
  std::atomic<std::uint64_t> refused_in_child_{0};
};

}  // namespace umem
