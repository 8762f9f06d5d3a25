// What streams may still do with memory that is free, or that its owner has freed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/block.hpp"
#include "core/driver.hpp"
#include "core/locks.hpp"
#include "core/types.hpp"

namespace umem {

// Whose free memory may serve another stream: those of the program, or umem's own, too.
enum class Streams : std::uint8_t { programs, all };

// With `books` of the locks.
class StreamUses {
 public:
  StreamUses(int device, Driver& driver, Locks& locks)
      : device_(device), driver_(driver), locks_(locks) {}

  // A stream that has memory.
  void add(StreamId stream) { streams_.insert(stream); }
  // As DeviceAllocator's.
  void add_own(StreamId stream) { own_streams_.insert(stream); }
  bool are(Streams streams, StreamId stream) const {
    return streams == Streams::all || !own_streams_.contains(stream);
  }

  // An event behind all that may still use free memory of these streams; 0 where it cannot be
  // waited for.
  EventId record(const std::set<StreamId>& owners);
  // Has the later work of one stream wait for what may still use free memory of another one.
  bool put_behind(StreamId later, StreamId earlier);

  // Waits for the other streams of a block that its owner, `user`, has freed.
  void await(Block* block, StreamId user, bool may_be_captured);
  bool has_pending() const { return !pending_.empty(); }
  template <class Call>
  void each_pending(Call&& call) const {
    for (const auto& [stream, events] : pending_)
      for (const Pending& pending : events) call(pending.block);
  }
  // Calls with each block whose other streams are finished.
  template <class Call>
  void take_finished(Call&& call) {
    for (auto queue = pending_.begin(); queue != pending_.end();) {
      std::deque<Pending>& events = queue->second;
      while (!events.empty() && driver_.finished(events.front().event)) {
        Block* block = events.front().block;
        events.pop_front();
        if (--block->pending_events == 0) call(block);
      }
      queue = events.empty() ? pending_.erase(queue) : std::next(queue);
    }
  }
  // The same for all, behind a wait, without the lock meanwhile.
  template <class Call>
  void wait_for_all(Call&& call) {
    for (const auto& [stream, events] : std::exchange(pending_, {}))
      for (const Pending& pending : events) {
        locks_.unlocked([&] { driver_.wait(pending.event); });
        if (--pending.block->pending_events == 0) call(pending.block);
      }
  }
  // Blocks that were freed during a capture, at the end of the last one.
  std::vector<Block*> take_deferred() { return std::exchange(deferred_, {}); }

 private:
  struct Pending {
    EventId event;
    Block* block;
  };

  const int device_;
  Driver& driver_;
  Locks& locks_;
  std::set<StreamId> streams_, own_streams_;
  std::map<DeviceStream, std::deque<Pending>> pending_;  // each in stream order
  std::vector<Block*> deferred_;
};

}  // namespace umem
