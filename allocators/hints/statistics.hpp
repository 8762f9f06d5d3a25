// Statistics of the hint engine.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "hints/request.hpp"

namespace umem {

// Counts for one operation on one tensor class. Times and outcomes are those of ended requests.
struct HintCounts {
  std::array<std::uint64_t, kOutcomes> requests{};  // by Outcome; `open` ones have not ended
  std::uint64_t asked_bytes = 0;
  std::uint64_t moved_bytes = 0;   // now at the requested place; some were there before
  std::uint64_t wasted_bytes = 0;  // superseded, forgotten, dropped or failed
  std::uint64_t calls = 0;         // chunks issued
  // Time in driver calls. Concurrent calls of a direction share its link, and so the time is
  // divided among them: moved_bytes / driver_ns is the link's rate for any number of workers. The
  // time of a call is divided by bytes among its requests.
  std::int64_t driver_ns = 0;
  std::uint64_t late = 0, early = 0;  // done after, and before, the phase that needs it began
  std::int64_t late_ns = 0;
  std::uint64_t missed = 0;  // needed, but never completed
};

struct HintFailure {
  std::string call;
  int error = 0;
  std::string text;
  std::uint64_t count = 0;
};

struct HintStatistics {
  std::array<std::array<HintCounts, kClasses>, kHintOps> counts{};
  std::vector<HintFailure> failures;
  std::uint64_t refused = 0;  // no ticket: the queue was full or the engine stopped
  std::size_t open_requests = 0;
  std::size_t queued_bytes = 0;
  std::array<std::size_t, kDirections> in_flight_bytes{};
};

}  // namespace umem
