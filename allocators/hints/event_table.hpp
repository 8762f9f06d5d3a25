// The events that requests wait for, and the requests that wait.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hints/request.hpp"

namespace umem {

// An event to query. It is kept alive until EventTable::let_go.
struct PolledEvent {
  EventId event = 0;
  int device = 0;
};

// Events are reference-counted: by the caller that recorded it until `release`, by each request
// that waits for it, and by a worker that queries it until `let_go`.
class EventTable {
 public:
  void recorded(EventId event, int device, StreamId stream) {
    events_[event] = {.stream = {device, stream}, .number = ++recorded_};
  }

  bool knows(EventId event) const { return events_.contains(event); }
  bool fired(EventId event) const { return events_.at(event).fired; }
  bool failed(EventId event) const { return events_.at(event).failed; }

  void wait(EventId event, Ticket ticket) {
    Event& of = events_.at(event);
    ++of.holders;
    of.waiting.insert(ticket);
    waited_for_[of.stream][of.number] = event;
  }
  // The ticket waits no longer, although the event has not completed.
  void stop_waiting(EventId event, Ticket ticket) {
    Event& of = events_.at(event);
    if (of.waiting.erase(ticket) == 0) return;
    if (of.waiting.empty()) query_no_more(of);
    let_go(event);
  }

  // A stream's events complete in order: of each stream, only the first event with a waiting
  // request is queried.
  std::vector<PolledEvent> hold_next() {
    std::vector<PolledEvent> next;
    for (const auto& [stream, events] : waited_for_) {
      const EventId event = events.begin()->second;
      ++events_.at(event).holders;
      next.push_back({event, stream.first});
    }
    return next;
  }

  // Returns the requests that waited for it. A failed event never completes.
  std::set<Ticket> fire(EventId event, bool failed) {
    Event& of = events_.at(event);
    if (of.fired) return {};
    of.fired = true;
    of.failed = failed;
    if (!of.waiting.empty()) query_no_more(of);
    std::set<Ticket> waited = std::exchange(of.waiting, {});
    of.holders -= waited.size();  // the worker that queried it still holds it
    return waited;
  }

  void let_go(EventId event) {
    const auto found = events_.find(event);
    if (found == events_.end() || --found->second.holders != 0) return;
    events_.erase(found);
    recycled_.push_back(event);
  }

  // Called by the recorder. Does nothing for an unknown or released event.
  void release(EventId event) {
    const auto found = events_.find(event);
    if (found == events_.end() || std::exchange(found->second.released, true)) return;
    let_go(event);
  }

  // Events without references, for the driver to reuse.
  std::vector<EventId> take_recycled() { return std::exchange(recycled_, {}); }

  bool anyone_waiting() const { return !waited_for_.empty(); }

 private:
  using Stream = std::pair<int, StreamId>;  // device, stream

  struct Event {
    Stream stream;
    std::uint64_t number = 0;  // in the order of recording
    std::size_t holders = 1;
    bool released = false;
    bool fired = false;
    bool failed = false;
    std::set<Ticket> waiting{};
  };

  void query_no_more(const Event& of) {
    const auto events = waited_for_.find(of.stream);
    events->second.erase(of.number);
    if (events->second.empty()) waited_for_.erase(events);
  }

  std::unordered_map<EventId, Event> events_;
  std::map<Stream, std::map<std::uint64_t, EventId>> waited_for_;  // by number
  std::uint64_t recorded_ = 0;
  std::vector<EventId> recycled_;
};

}  // namespace umem
