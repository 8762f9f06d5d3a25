// The engine's state: open requests, their dependencies, and what may be issued next. It has no
// threads and makes no driver calls, so every decision can be tested in isolation.
#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "hints/event_table.hpp"
#include "hints/hint_driver.hpp"
#include "hints/hint_queue.hpp"
#include "hints/statistics.hpp"

namespace umem {

// The range of one driver call: part of a request, or several adjacent requests.
struct Chunk {
  struct Part {
    Ticket ticket = 0;
    std::size_t bytes = 0;
  };

  HintOp op = HintOp::prefetch;
  int device = 0;
  Range range{};
  Advice advice{};
  std::vector<Part> parts{};
  std::int64_t link_ns = 0;  // its share of the link time so far
};

// A driver call's result; `call` is the name under which its failures are counted.
struct CallResult {
  const char* call = "";
  int error = 0;
};

class HintScheduler {
 public:
  HintScheduler(const HintSettings& settings, int lanes);

  // Requests and messages of callers, in order.
  void add(Ticket ticket, const HintRequest& request, std::int64_t now_ns);
  void mark_needed(Ticket ticket, std::int64_t now_ns);
  EventTable& events() { return events_; }

  // Workers' side. A completed event makes its requests ready, and these replace older ones.
  void fire(EventId event, bool failed, std::int64_t now_ns);
  std::optional<Chunk> take(Lane lane, std::int64_t now_ns);
  // Whether another lane may have work.
  bool has_work_beside(Lane lane) const;
  // The lane's chunk has finished.
  void settle(Lane lane, CallResult result, std::int64_t now_ns);
  // The lane's worker has ended: its current chunk has failed.
  void give_up(Lane lane, std::int64_t now_ns);

  // Drops queued parts of the range, but not running calls.
  void forget(Range range, std::int64_t now_ns);
  bool in_flight(Range range) const;
  void drop_all(std::int64_t now_ns);

  // True the first time that this call fails with this error.
  bool count_failure(const CallResult& result, const std::string& text);

  // nullptr for an unknown ticket, or one whose record was overwritten.
  const HintRecord* find(Ticket ticket);
  // Lock-free, for any thread: the outcome of a request that has ended and is still on record.
  std::optional<Outcome> ended(Ticket ticket) const noexcept;
  std::size_t open_requests() const { return open_.size(); }
  HintStatistics statistics() const;

 private:
  // Ready prefetches behind a chunk's first that another would overtake by joining the chunk.
  struct Overtaken {
    std::pair<Ticket, std::uintptr_t> until;  // looked at so far
    std::size_t looked_at = 0;
    bool waits = false;  // one of them waits for an eviction
  };

  HintCounts& counts(const HintRecord& record);
  void make_ready(const HintRecord& record, std::int64_t now_ns);
  void supersede_older(const HintRecord& newer, std::int64_t now_ns);
  void cut(const Piece& piece, Range range, Outcome outcome, std::int64_t now_ns);
  void resolve(Ticket ticket, std::size_t bytes, Outcome outcome, std::int64_t now_ns);
  void finish(HintRecord& record, std::int64_t now_ns);
  void keep_record(const HintRecord& record);
  HintRecord* on_record(Ticket ticket);
  void count_punctuality(const HintRecord& record);

  std::optional<Blocker> blocker_of(const Piece& piece) const;
  void share_link(Direction direction, std::int64_t now_ns);
  bool waits_for_eviction(const HintRequest& request, Ticket ticket) const;
  Ticket first_leaving(int device) const;
  bool overtakes(const Chunk& chunk, Ticket ticket, Overtaken& others) const;
  Range first_chunk(const HintRequest& request, Range range) const;
  void grow(Chunk& chunk, std::size_t limit_bytes, std::int64_t now_ns);
  void take_part(Chunk& chunk, const Piece& piece, Range range, std::int64_t now_ns);

  const HintSettings settings_;
  HintQueue queue_;
  EventTable events_;
  std::unordered_map<Ticket, HintRecord> open_;
  TicketsByRange advice_;              // open, and not to be overtaken by later requests
  std::vector<HintRecord> history_;    // ended requests, a ring by ticket
  std::map<Ticket, HintRecord> late_;  // ended after a newer request took their slot in the ring
  std::vector<std::atomic<std::uint64_t>> ended_;  // the same ring: ticket * kOutcomes + outcome
  std::map<int, std::set<Ticket>> leaving_;  // open evictions, by device
  std::vector<std::optional<Chunk>> in_flight_;  // by lane
  std::array<std::size_t, kDirections> in_flight_bytes_{};
  std::array<std::int64_t, kDirections> shared_until_ns_{};  // each direction's link
  HintStatistics stats_;
  std::map<std::pair<std::string, int>, HintFailure> failures_;
};

}  // namespace umem
