// The events that requests wait for, and the requests that wait.
#pragma once

#include <deque>
#include <map>
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
    events_[event] = {.stream = {device, stream}};
    streams_[{device, stream}].push_back(event);
  }

  bool knows(EventId event) const { return events_.contains(event); }
  bool fired(EventId event) const { return events_.at(event).fired; }
  bool failed(EventId event) const { return events_.at(event).failed; }

  void wait(EventId event, Ticket ticket) {
    Event& of = events_.at(event);
    ++of.holders;
    of.waiting.push_back(ticket);
    ++waiting_;
  }
  // The ticket waits no longer, although the event has not completed.
  void stop_waiting(EventId event, Ticket ticket) {
    if (std::erase(events_.at(event).waiting, ticket) == 0) return;
    --waiting_;
    let_go(event);
  }

  // A stream's events complete in order: of each stream, only the first event with a waiting
  // request is queried.
  std::vector<PolledEvent> hold_next() {
    std::vector<PolledEvent> next;
    if (waiting_ == 0) return next;
    for (const auto& [stream, events] : streams_)
      for (const EventId event : events)
        if (Event& of = events_.at(event); !of.waiting.empty()) {
          ++of.holders;
          next.push_back({event, stream.first});
          break;
        }
    return next;
  }

  // Returns the requests that waited for it. A failed event never completes.
  std::vector<Ticket> fire(EventId event, bool failed) {
    Event& of = events_.at(event);
    if (of.fired) return {};
    of.fired = true;
    of.failed = failed;
    leave_stream(event, of);
    std::vector<Ticket> waited = std::move(of.waiting);
    of.waiting.clear();
    waiting_ -= waited.size();
    of.holders -= waited.size();  // the worker that queried it still holds it
    return waited;
  }

  void let_go(EventId event) {
    const auto found = events_.find(event);
    if (found == events_.end() || --found->second.holders != 0) return;
    if (!found->second.fired) leave_stream(event, found->second);
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

  bool anyone_waiting() const { return waiting_ != 0; }

 private:
  struct Event {
    std::pair<int, StreamId> stream;
    std::size_t holders = 1;
    bool released = false;
    bool fired = false;
    bool failed = false;
    std::vector<Ticket> waiting{};
  };

  void leave_stream(EventId event, const Event& of) {
    const auto found = streams_.find(of.stream);
    std::erase(found->second, event);
    if (found->second.empty()) streams_.erase(found);
  }

  std::unordered_map<EventId, Event> events_;
  std::map<std::pair<int, StreamId>, std::deque<EventId>> streams_;  // not fired, oldest first
  std::size_t waiting_ = 0;
  std::vector<EventId> recycled_;
};

}  // namespace umem
