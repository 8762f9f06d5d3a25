// The workers' side of the scheduler: choosing the next chunk, and accounting for its end.
#include "hints/hint_scheduler.hpp"

namespace umem {
namespace {

// The first part of a range: it ends where the range does or on a 2 MiB boundary, so that no block
// of pages is moved in two calls.
Range first_part(Range range, std::size_t limit_bytes) {
  if (range.bytes <= limit_bytes) return range;
  const std::uintptr_t end = (range.address + limit_bytes) / kPageBytes * kPageBytes;
  return {range.address, end > range.address ? end - range.address : 0};
}

// A chunk passes at most this many requests to one that joins it: joining saves a call, and looking
// takes time, in which callers wait.
constexpr std::size_t kMostOvertaken = 64;

constexpr Ticket kNone = ~Ticket{0};

}  // namespace

std::optional<Chunk> HintScheduler::take(Lane lane, std::int64_t now_ns) {
  const std::size_t direction = index_of(lane.direction);
  std::vector<int> waiting;  // devices whose first prefetch waits: no other may overtake it
  while (const std::optional<Piece> first = queue_.first_ready(lane.direction, waiting)) {
    const Piece& piece = *first;
    const HintRequest& request = open_.at(piece.ticket).request;
    if (const std::optional<Blocker> blocker = blocker_of(piece)) {
      queue_.park(piece, *blocker);
      continue;
    }
    const Range range = first_chunk(request, piece.range);
    if (in_flight_bytes_[direction] != 0 &&
        in_flight_bytes_[direction] + range.bytes > settings_.in_flight_bytes)
      return std::nullopt;
    if (waits_for_eviction(request, piece.ticket)) {
      waiting.push_back(request.device);
      continue;
    }

    Chunk chunk{.op = request.op,
                .device = request.device,
                .range = {range.address, 0},
                .advice = request.advice};
    take_part(chunk, piece, range, now_ns);
    if (request.op != HintOp::advise) {
      const std::size_t free_bytes = settings_.in_flight_bytes - in_flight_bytes_[direction];
      grow(chunk, std::min(settings_.chunk_bytes, free_bytes), now_ns);
    }
    share_link(lane.direction, now_ns);
    in_flight_[static_cast<std::size_t>(lane.number)] = chunk;
    in_flight_bytes_[direction] += chunk.range.bytes;
    return chunk;
  }
  return std::nullopt;
}

bool HintScheduler::has_work_beside(Lane lane) const {
  return queue_.any_ready(Direction::to_device) ||
         (lane.direction == Direction::to_device && queue_.any_ready(Direction::to_host));
}

// A call on the same bytes that is running, or older advice that has not been given.
std::optional<Blocker> HintScheduler::blocker_of(const Piece& piece) const {
  for (std::size_t lane = 0; lane < in_flight_.size(); ++lane)
    if (const std::optional<Chunk>& chunk = in_flight_[lane];
        chunk && overlap(chunk->range, piece.range))
      return Blocker{.lane = static_cast<int>(lane)};
  // The newest one: when it ends, few others are left. Mostly it has the same range.
  Ticket newest = advice_.newest_of(open_.at(piece.ticket).request.range, piece.ticket);
  if (newest == 0) newest = advice_.newest_overlapping(piece.range, piece.ticket);
  return newest == 0 ? std::nullopt : std::optional(Blocker{.ticket = newest});
}

// Called whenever a chunk starts or ends: the running chunks of a direction share the time since
// the last call equally.
void HintScheduler::share_link(Direction direction, std::int64_t now_ns) {
  const std::int64_t since_ns = std::exchange(shared_until_ns_[index_of(direction)], now_ns);
  std::vector<Chunk*> sharing;
  for (std::optional<Chunk>& chunk : in_flight_)
    if (chunk && direction_of(chunk->op) == direction) sharing.push_back(&*chunk);
  for (Chunk* chunk : sharing)
    chunk->link_ns += (now_ns - since_ns) / static_cast<std::int64_t>(sharing.size());
}

// The bytes that one call may move of a part of a request. Advice moves nothing.
Range HintScheduler::first_chunk(const HintRequest& request, Range range) const {
  if (request.op == HintOp::advise) return range;
  return first_part(range, std::min(settings_.chunk_bytes, settings_.in_flight_bytes));
}

// Whether a prefetch comes after an eviction that has not ended. Only earlier requests count: a
// thread that waits for this one submits nothing until it has ended.
bool HintScheduler::waits_for_eviction(const HintRequest& request, Ticket ticket) const {
  return request.op == HintOp::prefetch &&
         first_leaving(request.device) <= std::min(request.after, ticket);
}

// The oldest open eviction of a device; behind all tickets if there is none.
Ticket HintScheduler::first_leaving(int device) const {
  const auto found = leaving_.find(device);
  return found == leaving_.end() || found->second.empty() ? kNone : *found->second.begin();
}

// Whether a request in the chunk would overtake one that waits for an eviction on its device. Older
// waiting requests than the chunk's first do not exist: the chunk would not have been chosen.
bool HintScheduler::overtakes(const Chunk& chunk, Ticket ticket, Overtaken& others) const {
  if (chunk.op != HintOp::prefetch || first_leaving(chunk.device) == kNone) return false;
  const HintQueue::Order& ready = queue_.ready(Direction::to_device, chunk.device);
  for (auto next = ready.upper_bound(others.until); next != ready.end() && next->first < ticket;
       ++next) {
    if (++others.looked_at > kMostOvertaken) return true;
    others.until = *next;
    const Piece piece = queue_.piece(next->first, next->second);
    others.waits = others.waits || (waits_for_eviction(open_.at(piece.ticket).request,
                                                       piece.ticket) &&
                                    !blocker_of(piece));
  }
  return others.waits;
}

// Adjacent ranges with the same operation join the chunk: one call moves them faster than many.
void HintScheduler::grow(Chunk& chunk, std::size_t limit_bytes, std::int64_t now_ns) {
  const Ticket first = chunk.parts.front().ticket;
  const TensorClass tensor_class = open_.at(first).request.tensor_class;
  Overtaken others{.until = {first, UINTPTR_MAX}};
  const auto joins = [&](const Piece& piece) {
    // Read-mostly pages are evicted in another way, and belong to whole classes.
    if (chunk.op == HintOp::evict && open_.at(piece.ticket).request.tensor_class != tensor_class)
      return false;
    return !blocker_of(piece) && !overtakes(chunk, piece.ticket, others);
  };
  const auto take_one_of = [&](const std::vector<Piece>& pieces, bool before) {
    for (const Piece& piece : pieces) {
      if (chunk.range.bytes >= limit_bytes || !joins(piece)) continue;
      const Range range = first_part(piece.range, limit_bytes - chunk.range.bytes);
      if (range.bytes == 0 || (before && range.bytes != piece.range.bytes) ||
          waits_for_eviction(open_.at(piece.ticket).request, piece.ticket))
        continue;
      take_part(chunk, piece, range, now_ns);
      return true;
    }
    return false;
  };
  while (take_one_of(queue_.ready_starting_at(chunk.op, chunk.device, end_of(chunk.range)),
                     false)) {
  }
  while (take_one_of(queue_.ready_ending_at(chunk.op, chunk.device, chunk.range.address), true)) {
  }
}

// Moves `range`, which is adjacent to the chunk, from the queue into the chunk.
void HintScheduler::take_part(Chunk& chunk, const Piece& piece, Range range, std::int64_t now_ns) {
  // The queue may drop pieces beyond its capacity: these are lost, not issued.
  const std::size_t gone_bytes = queue_.cut(piece, range);
  chunk.range.address = std::min(chunk.range.address, range.address);
  chunk.range.bytes += range.bytes;
  chunk.parts.push_back({piece.ticket, range.bytes});
  if (gone_bytes != range.bytes)
    resolve(piece.ticket, gone_bytes - range.bytes, Outcome::dropped, now_ns);
}

void HintScheduler::settle(Lane lane, CallResult result, std::int64_t now_ns) {
  share_link(lane.direction, now_ns);
  std::optional<Chunk>& slot = in_flight_[static_cast<std::size_t>(lane.number)];
  const Chunk chunk = std::move(*slot);
  slot.reset();
  queue_.unpark({.lane = lane.number});
  in_flight_bytes_[index_of(lane.direction)] -= chunk.range.bytes;
  const Outcome outcome = result.error == 0 ? Outcome::done : Outcome::failed;
  ++counts(open_.at(chunk.parts.front().ticket)).calls;
  for (const Chunk::Part& part : chunk.parts) {
    counts(open_.at(part.ticket)).driver_ns += static_cast<std::int64_t>(
        static_cast<double>(chunk.link_ns) * static_cast<double>(part.bytes) /
        static_cast<double>(chunk.range.bytes));
    resolve(part.ticket, part.bytes, outcome, now_ns);
  }
}

void HintScheduler::give_up(Lane lane, std::int64_t now_ns) {
  if (in_flight_[static_cast<std::size_t>(lane.number)]) settle(lane, {"", -1}, now_ns);
}

}  // namespace umem
