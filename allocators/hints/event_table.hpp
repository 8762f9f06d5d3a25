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

// An event is kept for the requests that wait for it, and for a worker that queries it.
class EventTable {
 public:
  void wait(const HintRequest& request, Ticket ticket) {
    const auto [found, is_new] = events_.try_emplace(request.event);
    Event& of = found->second;
    if (is_new) {
      of = {.stream = {request.device, request.stream}, .number = ++last_number_};
      waited_for_[of.stream][of.number] = request.event;
    }
    of.waiting.insert(ticket);
  }
  // The ticket waits no longer, although the event has not completed. Does nothing if it does not
  // wait.
  void stop_waiting(EventId event, Ticket ticket) {
    const auto found = events_.find(event);
    if (found == events_.end() || found->second.waiting.erase(ticket) == 0) return;
    if (found->second.waiting.empty()) query_no_more(found->second);
    recycle_unused(event);
  }

  // A stream's events complete in order: of each stream, only the first event with a waiting
  // request is queried.
  std::vector<PolledEvent> hold_next() {
    std::vector<PolledEvent> next;
    for (const auto& [stream, events] : waited_for_) {
      const EventId event = events.begin()->second;
      ++events_.at(event).queries;
      next.push_back({event, stream.first});
    }
    return next;
  }
  void let_go(EventId event) {
    --events_.at(event).queries;
    recycle_unused(event);
  }

  // Returns the requests that waited for it.
  std::set<Ticket> fire(EventId event) {
    Event& of = events_.at(event);
    if (!of.waiting.empty()) query_no_more(of);
    std::set<Ticket> waited = std::exchange(of.waiting, {});
    recycle_unused(event);
    return waited;
  }

  // Events that nobody needs, for the driver to reuse.
  std::vector<EventId> take_recycled() { return std::exchange(recycled_, {}); }

  bool anyone_waiting() const { return !waited_for_.empty(); }

 private:
  using Stream = std::pair<int, StreamId>;  // device, stream

  struct Event {
    Stream stream;
    std::uint64_t number = 0;  // in the order of recording
    std::set<Ticket> waiting{};
    std::size_t queries = 0;  // under way
  };

  void query_no_more(const Event& of) {
    const auto events = waited_for_.find(of.stream);
    events->second.erase(of.number);
    if (events->second.empty()) waited_for_.erase(events);
  }
  void recycle_unused(EventId event) {
    const auto found = events_.find(event);
    if (!found->second.waiting.empty() || found->second.queries != 0) return;
    events_.erase(found);
    recycled_.push_back(event);
  }

  std::unordered_map<EventId, Event> events_;
  std::map<Stream, std::map<std::uint64_t, EventId>> waited_for_;  // by number
  std::uint64_t last_number_ = 0;
  std::vector<EventId> recycled_;
};

}  // namespace umem
