// Types of the hint engine: requests, settings, outcomes and records.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/types.hpp"

namespace umem {

// The first two are umem.HintOp's, with its numbers (umem/core/schedule.py).
enum class HintOp : std::uint8_t { prefetch, evict, advise };
inline constexpr std::size_t kHintOps = 3;

// Which workers serve a request. Advice moves nothing, and is issued by the workers whose
// prefetches it cannot delay.
enum class Direction : std::uint8_t { to_device, to_host };
inline constexpr std::size_t kDirections = 2;

constexpr std::size_t index_of(Direction direction) {
  return static_cast<std::size_t>(direction);
}

constexpr Direction direction_of(HintOp op) {
  return op == HintOp::prefetch ? Direction::to_device : Direction::to_host;
}

using Ticket = std::uint64_t;  // 0: the request was refused

// Stands for an event that could not be recorded. Requests that wait for it are dropped, because
// the completion of the work before it is unknown.
inline constexpr EventId kNoEvent = ~EventId{0};

struct HintRequest {
  HintOp op = HintOp::prefetch;
  Range range{};
  int device = 0;
  EventId event = 0;    // of its batch, to wait for; 0 outside of batches
  StreamId stream = 0;  // of the event
  Ticket after = 0;   // prefetch: begins when the evictions up to this ticket have ended
  TensorClass tensor_class = TensorClass::other;
  Advice advice{};  // advise
};

// Outcome of a request, from good to bad: the worst part of a range counts for the whole. The order
// is that of the Python enumeration in umem/runtime/hints.py.
enum class Outcome : std::uint8_t { open, done, superseded, forgotten, dropped, failed };
inline constexpr std::size_t kOutcomes = 6;
inline constexpr std::array<const char*, kOutcomes> kOutcomeNames = {
    "open", "done", "superseded", "forgotten", "dropped", "failed"};

// Times are nanoseconds of CLOCK_MONOTONIC; 0: not yet.
struct HintRecord {
  Ticket ticket = 0;
  HintRequest request{};
  std::int64_t done_ns = 0;
  std::int64_t needed_ns = 0;
  std::size_t open_bytes = 0;  // queued, or in a driver call
  std::size_t moved_bytes = 0;
  Outcome outcome = Outcome::open;
};

// Calls to do without, as with a driver that refuses them.
struct Without {
  bool second_context = false;
  bool prefetch = false;  // to either side
  bool advice = false;
};

struct HintSettings {
  // On one H200, prefetches near the link's speed beside an eviction from 128 MiB on.
  std::size_t chunk_bytes = std::size_t{128} << 20;
  std::size_t in_flight_bytes = std::size_t{256} << 20;  // in driver calls, in each direction
  std::size_t capacity = 8192;                           // requests that are open at once
  int prefetch_workers = 2;
  std::int64_t poll_ns = 100'000;  // between two polls of an event
  Without without{};
};

constexpr std::uintptr_t end_of(Range range) { return range.address + range.bytes; }

constexpr Range common(Range a, Range b) {
  const std::uintptr_t start = std::max(a.address, b.address);
  const std::uintptr_t end = std::min(end_of(a), end_of(b));
  return {start, end > start ? end - start : 0};
}

constexpr bool overlap(Range a, Range b) { return common(a, b).bytes != 0; }

}  // namespace umem
