// Asks the driver to move managed memory ahead of need, from threads of its own.
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

class HintCrew;

// Thread-safe. No error of a driver call leaves the engine: it is counted, told once on stderr, and
// the next request is served. In a forked child every request is refused and nothing is waited for.
class HintEngine {
 public:
  // Throws std::invalid_argument for settings that make no sense. Threads start with the first
  // request.
  HintEngine(const HintSettings& settings, std::unique_ptr<HintDriver> driver);
  ~HintEngine();
  HintEngine(const HintEngine&) = delete;
  HintEngine& operator=(const HintEngine&) = delete;

  // Starts the threads now and lets each get what it needs of `device`: a context is dear to make.
  void start(int device);

  // Takes a request, in the order of calls, without a driver call. 0 when the queue is full or the
  // engine has stopped. Throws std::invalid_argument for a request that cannot be meant.
  Ticket submit(const HintRequest& request);
  // Takes all entries of the batch that have an address, as if they were submitted one by one to
  // wait for the work that `stream` holds now: one driver call, one lock. Those that a full queue
  // refuses are the last ones. `after`, of each entry or of none, is HintRequest::after. Throws
  // std::invalid_argument for another number of them.
  TicketSpan fire(HintBatch& batch, StreamId stream, std::span<const Ticket> after = {});
  // The phase that needs the requests begins now. Tickets of 0 are passed over.
  void mark_needed(std::vector<Ticket> tickets);

  // An event for requests that must wait for the work that `stream` holds now: one driver call,
  // which does not block. Whoever records it releases it, once its requests are submitted.
  EventId record(int device, StreamId stream);
  void release(EventId event);

  // Bytes that prefetches may fill beside what is resident; 0 for no bound.
  void set_budget(int device, std::size_t bytes);
  // Tells of memory that comes to be on the device, or goes, without a hint.
  void set_resident(int device, Range range, bool resident);

  // Drops what is queued of the range, copies from and to it included, and waits until no driver
  // call is at work on it. After `true` the memory may be unmapped or used anew; `false` when the
  // time ran out.
  bool forget(Range range, std::int64_t timeout_ns);
  // Forgets what an allocator releases. Outlives the engine, and does nothing in a forked child.
  std::shared_ptr<ReleaseListener> release_listener() const;

  // The outcome, `open` when the time ran out; nothing for a ticket that is not on record.
  std::optional<Outcome> wait(Ticket ticket, std::int64_t timeout_ns);
  // The outcome of a request that has ended; nothing for others. Takes no lock.
  std::optional<Outcome> ended(Ticket ticket) const noexcept;
  std::optional<HintRecord> find(Ticket ticket);
  HintStatistics statistics();

  // Lets running calls end, drops the rest, ends the threads. False when a call did not end in
  // time: its thread is left to itself, and the engine's own end does not wait for it again.
  // Further calls do nothing.
  bool shutdown(std::int64_t timeout_ns);

  // For the fork guard, in a child: the threads are gone, and their locks with them.
  void abandon() noexcept;

 private:
  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  std::shared_ptr<HintCrew> crew_;  // shared with the threads, which may outlive the engine
  std::atomic<bool> forked_{false};
  std::atomic<bool> shut_down_{false};  // nothing is left for the destructor
  std::atomic<std::uint64_t> refused_in_child_{0};
};

}  // namespace umem
