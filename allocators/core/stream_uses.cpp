#include "core/stream_uses.hpp"

#include <algorithm>

namespace umem {

// Not only the owners may use it, see Note [Borrowing] in device_allocator_borrowed.cpp.
EventId StreamUses::record(const std::set<StreamId>& owners) {
  const auto is_captured = [this](StreamId stream) { return driver_.capturing(stream); };
  if (std::ranges::any_of(owners, is_captured)) return 0;
  const bool is_programs = std::ranges::all_of(
      owners, [this](StreamId stream) { return are(Streams::programs, stream); });
  std::vector<StreamId> streams;
  for (const StreamId stream : streams_)
    if (are(is_programs ? Streams::programs : Streams::all, stream) && !is_captured(stream))
      streams.push_back(stream);
  return driver_.record_all(device_, streams);
}

bool StreamUses::put_behind(StreamId later, StreamId earlier) {
  if (driver_.capturing(later)) return false;
  const EventId event = record({earlier});
  return event != 0 && driver_.order(device_, later, event);
}

void StreamUses::await(Block* block, StreamId user, bool may_be_captured) {
  if (may_be_captured) {
    bool capturing = driver_.capturing(user);
    for (const DeviceStream& other : block->other_streams)
      capturing = capturing || driver_.capturing(other.stream);
    if (capturing) {  // an event recorded now would be a node of the graph, never to be queried
      deferred_.push_back(block);
      return;
    }
  }
  const std::vector<DeviceStream> streams = std::exchange(block->other_streams, {});
  block->pending_events = static_cast<std::uint32_t>(streams.size());
  std::vector<EventId> events(streams.size());
  locks_.recording([&] {
    for (std::size_t i = 0; i < streams.size(); ++i)
      events[i] = driver_.record(streams[i].device, streams[i].stream);
  });
  // No event: the driver or the stream is gone, and the end of the work is unknown, so the block is
  // never reused.
  for (std::size_t i = 0; i < streams.size(); ++i)
    if (events[i] != 0) pending_[streams[i]].push_back({events[i], block});
}

}  // namespace umem
