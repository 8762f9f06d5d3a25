#include "hints/hint_scheduler.hpp"

namespace umem {
namespace {

// Whether `newer` supersedes an older request that was not issued yet.
bool replaces(const HintRequest& newer, HintOp older, bool same_place) {
  switch (newer.op) {
    case HintOp::prefetch:
      return older == HintOp::evict || (older == HintOp::prefetch && !same_place);
    case HintOp::evict:
      return older == HintOp::prefetch;
    case HintOp::advise:
      return older == HintOp::advise && same_place;
  }
  return false;
}

}  // namespace

HintScheduler::HintScheduler(const HintSettings& settings, int lanes)
    : settings_(settings),
      queue_(2 * settings.capacity),
      history_(settings.capacity),
      ended_(settings.capacity),
      in_flight_(static_cast<std::size_t>(lanes)) {}

HintCounts& HintScheduler::counts(const HintRecord& record) {
  return stats_.counts[static_cast<std::size_t>(record.request.op)]
                      [static_cast<std::size_t>(record.request.tensor_class)];
}

// ---- requests and their outcomes ----

void HintScheduler::add(Ticket ticket, const HintRequest& request, std::int64_t now_ns) {
  HintRecord& record = open_[ticket];
  record = {.ticket = ticket, .request = request, .open_bytes = request.range.bytes};
  HintCounts& of = counts(record);
  ++of.requests[static_cast<std::size_t>(Outcome::open)];
  of.asked_bytes += request.range.bytes;
  if (request.op == HintOp::advise) advice_.add(request.range, ticket);
  if (request.op == HintOp::evict) leaving_[request.device].insert(ticket);

  const EventId event = request.event;
  if (event == kNoEvent) {
    resolve(ticket, request.range.bytes, Outcome::dropped, now_ns);
    return;
  }
  queue_.add(
      {.ticket = ticket, .range = request.range, .op = request.op, .device = request.device});
  if (event == 0)
    make_ready(record, now_ns);
  else
    events_.wait(request, ticket);
}

void HintScheduler::fire(EventId event, bool failed, std::int64_t now_ns) {
  for (const Ticket ticket : events_.fire(event)) {
    const auto found = open_.find(ticket);
    if (found == open_.end()) continue;
    if (!failed) {
      make_ready(found->second, now_ns);
      continue;
    }
    for (const Piece& piece : queue_.of(ticket)) cut(piece, piece.range, Outcome::dropped, now_ns);
  }
}

void HintScheduler::make_ready(const HintRecord& record, std::int64_t now_ns) {
  // Only when ready: before its own event, a newer request does not supersede older ones.
  supersede_older(record, now_ns);
  queue_.set_ready(record.ticket);
}

void HintScheduler::supersede_older(const HintRecord& newer, std::int64_t now_ns) {
  const HintRequest& request = newer.request;
  const auto superseded = [&](HintOp op, int device) {
    return replaces(request, op, device == request.device);
  };
  for (const Piece& piece : queue_.older_overlapping(request.range, newer.ticket, superseded))
    cut(piece, request.range, Outcome::superseded, now_ns);
}

void HintScheduler::cut(const Piece& piece, Range range, Outcome outcome, std::int64_t now_ns) {
  resolve(piece.ticket, queue_.cut(piece, range), outcome, now_ns);
}

void HintScheduler::resolve(Ticket ticket, std::size_t bytes, Outcome outcome,
                            std::int64_t now_ns) {
  HintRecord& record = open_.at(ticket);
  record.open_bytes -= bytes;
  record.outcome = std::max(record.outcome, outcome);
  if (outcome == Outcome::done) record.moved_bytes += bytes;
  if (record.open_bytes == 0) finish(record, now_ns);
}

void HintScheduler::finish(HintRecord& record, std::int64_t now_ns) {
  const HintRequest& request = record.request;
  record.done_ns = now_ns;
  events_.stop_waiting(request.event, record.ticket);
  if (request.op == HintOp::advise) {
    advice_.remove(request.range, record.ticket);
    queue_.unpark({.ticket = record.ticket});
  }
  if (request.op == HintOp::evict) leaving_.at(request.device).erase(record.ticket);

  HintCounts& of = counts(record);
  --of.requests[static_cast<std::size_t>(Outcome::open)];
  ++of.requests[static_cast<std::size_t>(record.outcome)];
  of.moved_bytes += record.moved_bytes;
  of.wasted_bytes += request.range.bytes - record.moved_bytes;
  if (record.needed_ns != 0) count_punctuality(record);
  const Ticket ticket = record.ticket;  // erasing invalidates the record
  keep_record(record);
  open_.erase(ticket);
}

void HintScheduler::keep_record(const HintRecord& record) {
  const Ticket ticket = record.ticket;
  HintRecord& slot = history_[ticket % history_.size()];
  if (slot.ticket > ticket) {
    late_[ticket] = record;
    if (late_.size() > history_.size()) late_.erase(late_.begin());
    return;
  }
  slot = record;
  ended_[ticket % ended_.size()].store(
      ticket * kOutcomes + static_cast<std::uint64_t>(record.outcome), std::memory_order_release);
}

HintRecord* HintScheduler::on_record(Ticket ticket) {
  if (const auto found = late_.find(ticket); found != late_.end()) return &found->second;
  HintRecord& record = history_[ticket % history_.size()];
  return ticket != 0 && record.ticket == ticket ? &record : nullptr;
}

void HintScheduler::mark_needed(Ticket ticket, std::int64_t now_ns) {
  const auto found = open_.find(ticket);
  if (found != open_.end()) {
    if (found->second.needed_ns == 0) found->second.needed_ns = now_ns;
    return;
  }
  HintRecord* const record = on_record(ticket);  // nullptr for 0, too
  if (record == nullptr || record->needed_ns != 0) return;
  record->needed_ns = now_ns;
  count_punctuality(*record);
}

void HintScheduler::count_punctuality(const HintRecord& record) {
  HintCounts& of = counts(record);
  const std::int64_t late_ns = record.done_ns - record.needed_ns;
  if (record.outcome != Outcome::done)
    ++of.missed;
  else if (late_ns > 0)
    ++of.late, of.late_ns += late_ns;
  else
    ++of.early;
}

void HintScheduler::forget(Range range, std::int64_t now_ns) {
  for (const Piece& piece : queue_.overlapping(range))
    cut(piece, range, Outcome::forgotten, now_ns);
}

bool HintScheduler::in_flight(Range range) const {
  return std::any_of(in_flight_.begin(), in_flight_.end(), [&](const std::optional<Chunk>& chunk) {
    return chunk && overlap(chunk->range, range);
  });
}

void HintScheduler::drop_all(std::int64_t now_ns) {
  for (const Piece& piece : queue_.overlapping({0, UINTPTR_MAX}))
    cut(piece, piece.range, Outcome::dropped, now_ns);
}

// ---- queries ----

bool HintScheduler::count_failure(const CallResult& result, const std::string& text) {
  HintFailure& failure = failures_[{result.call, result.error}];
  failure.call = result.call;
  failure.error = result.error;
  failure.text = text;
  return ++failure.count == 1;
}

const HintRecord* HintScheduler::find(Ticket ticket) {
  if (const auto found = open_.find(ticket); found != open_.end()) return &found->second;
  return on_record(ticket);
}

std::optional<Outcome> HintScheduler::ended(Ticket ticket) const noexcept {
  const std::uint64_t last = ended_[ticket % ended_.size()].load(std::memory_order_acquire);
  if (ticket == 0 || last / kOutcomes != ticket) return std::nullopt;
  return static_cast<Outcome>(last % kOutcomes);
}

HintStatistics HintScheduler::statistics() const {
  HintStatistics stats = stats_;
  for (const auto& [key, failure] : failures_) stats.failures.push_back(failure);
  stats.open_requests = open_.size();
  stats.queued_bytes = queue_.bytes();
  stats.in_flight_bytes = in_flight_bytes_;
  return stats;
}

}  // namespace umem
