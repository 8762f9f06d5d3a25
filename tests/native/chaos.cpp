// Each call of the hint engine's driver fails once, at each of its places in a program that makes
// them all.
//
// In the end the statistics agree, nothing leaks (the fake sees to that) and nothing hangs.
#include <numeric>

#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr int kDevices = 2;
constexpr StreamId kSide = 7;

// ---- hints ----

constexpr int kError = 700;

// All operations, behind events where they may be, on two GPUs. Returns how many were submitted.
std::uint64_t submit_all(HintMachine& machine) {
  std::vector<Ticket> tickets;
  for (int device = 0; device < kDevices; ++device)
    for (std::size_t op = 0; op < kHintOps; ++op) {
      const std::size_t place = 100 * tickets.size();
      const auto operation = static_cast<HintOp>(op);
      machine.driver.launch(device, kSide);
      for (const std::size_t part : {std::size_t{0}, std::size_t{4}}) {
        const Range range = blocks(place + part, 4);
        const Ticket ticket = operation == HintOp::advise
                                  ? machine.ask(operation, range, device)
                                  : machine.ask_behind(operation, range, kSide, device);
        CHECK(ticket != 0);
        tickets.push_back(ticket);
      }
      machine.driver.finish(device, kSide);
    }
  for (const Ticket ticket : tickets) {
    const auto outcome = machine.engine.wait(ticket, kPatienceNs);
    CHECK(outcome.has_value());
    CHECK(*outcome != Outcome::open);
  }
  return tickets.size();
}

struct HintTotals {
  std::uint64_t requests = 0, bad = 0, failures = 0;
};

HintTotals totals(const HintStatistics& stats) {
  HintTotals found;
  for (const auto& of_op : stats.counts)
    for (const HintCounts& counts : of_op) {
      found.requests += std::accumulate(counts.requests.begin(), counts.requests.end(),
                                        std::uint64_t{0});
      found.bad += counts.requests[number_of(Outcome::failed)] +
                   counts.requests[number_of(Outcome::dropped)];
      CHECK(counts.moved_bytes + counts.wasted_bytes <= counts.asked_bytes);
    }
  for (const HintFailure& failure : stats.failures) found.failures += failure.count;
  CHECK_EQUAL(stats.open_requests, 0U);
  CHECK_EQUAL(stats.queued_bytes, 0U);
  for (const std::size_t bytes : stats.in_flight_bytes) CHECK_EQUAL(bytes, 0U);
  return found;
}

TEST(each_call_of_the_hint_engine_fails_once) {
  std::int64_t calls = 0, failed = 0;
  for (std::int64_t number = -1; number < calls; ++number) {
    HintMachine machine({.chunk_bytes = 4 * MiB, .in_flight_bytes = 16 * MiB});
    machine.driver.fail_at(number, kError);
    const std::uint64_t submitted = submit_all(machine);
    if (number < 0) calls = machine.driver.fallible_calls();
    machine.driver.fail_at(-1, 0);
    const HintTotals first = totals(machine.engine.statistics());
    CHECK_EQUAL(first.requests, submitted);
    CHECK(first.failures <= 1);
    CHECK(first.bad == 0 || number >= 0);
    failed += static_cast<std::int64_t>(first.failures);
    // The engine serves what comes next.
    const HintTotals second = [&] {
      submit_all(machine);
      return totals(machine.engine.statistics());
    }();
    CHECK_EQUAL(second.requests, 2 * submitted);
    CHECK_EQUAL(second.bad, first.bad);
    CHECK_EQUAL(machine.driver.events(), 0U);
    CHECK(machine.engine.shutdown(kPatienceNs));
  }
  CHECK(calls > 50);
  CHECK(failed > calls / 2);
  std::printf("calls of the hint engine's driver, each failed: %lld\n",
              static_cast<long long>(calls));
}

}  // namespace
}  // namespace umem
