// Requests wait for the GPU's work in a worker, never in the submitting thread.
#include <algorithm>

#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr StreamId kStream = 7, kOtherStream = 8;
constexpr double kSubmitNs = 20'000;  // what the caller may be kept

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

TEST(a_request_waits_for_its_event) {
  HintMachine machine;
  const EventId event = machine.busy_event(kStream);
  const Ticket waiting = machine.prefetch(blocks(0, 1), event);
  machine.expect_done(machine.prefetch(blocks(10, 1)));  // waits for nothing: goes ahead
  machine.expect_open(waiting);
  CHECK_EQUAL(machine.driver.count("prefetch"), 1U);
  machine.driver.finish(0, kStream);
  machine.expect_done(waiting);
  machine.expect_done(machine.prefetch(blocks(20, 1), event));  // over already
  machine.engine.release(event);
  const auto record = machine.engine.find(waiting);
  CHECK(record->ready_ns - record->asked_ns >= kSoonNs);
  CHECK(machine.counts(HintOp::prefetch).event_wait_ns >= kSoonNs);
}

TEST(streams_do_not_wait_for_each_other) {
  HintMachine machine;
  machine.driver.launch(0, kStream);
  machine.driver.launch(0, kOtherStream);
  const EventId one = machine.engine.record(0, kStream);
  const EventId other = machine.engine.record(0, kOtherStream);
  const Ticket on_one = machine.prefetch(blocks(0, 1), one);
  const Ticket on_other = machine.prefetch(blocks(10, 1), other);
  machine.engine.release(one);
  machine.engine.release(other);
  machine.driver.finish(0, kOtherStream);
  machine.expect_done(on_other);
  machine.expect_open(on_one);
  machine.driver.finish(0, kStream);
  machine.expect_done(on_one);
}

// Of a stream, only the next event is asked about, however many wait.
TEST(a_long_queue_asks_little) {
  HintMachine machine({.poll_ns = 1'000'000});
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 200; ++i) {
    const EventId event = machine.busy_event(kStream);
    tickets.push_back(machine.prefetch(blocks(2 * i, 1), event));
    machine.engine.release(event);
  }
  machine.expect_open(tickets.back());
  const std::size_t before = machine.driver.count("query");
  machine.expect_open(tickets.back());
  // One look each poll, by one worker: 20 or so in 20 ms, and a few for late wake-ups.
  CHECK(machine.driver.count("query") - before <= 60);
  machine.driver.finish(0, kStream);
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
}

TEST(events_are_given_back) {
  HintMachine machine;
  for (int i = 0; i < 20; ++i) {
    const EventId event = machine.engine.record(0, kStream);
    machine.prefetch(blocks(0, 1), event);
    machine.engine.wait(machine.evict(blocks(0, 1), event), kPatienceNs);
    machine.engine.release(event);
    machine.engine.release(event);  // once too often
  }
  machine.engine.release(kNoEvent);
  machine.engine.release(12345);
  machine.engine.statistics();
  machine.engine.wait(machine.prefetch(blocks(1, 1)), kPatienceNs);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

// Without an event nobody knows when the work is over: such a request is not risked.
TEST(no_event_means_no_hint) {
  HintMachine machine;
  machine.driver.fail("record", 5);
  const EventId event = machine.engine.record(0, kStream);
  CHECK_EQUAL(event, kNoEvent);
  machine.expect(machine.evict(blocks(0, 1), event), Outcome::dropped);
  machine.expect(machine.prefetch(blocks(0, 1), 999), Outcome::dropped);  // never recorded
  CHECK(machine.driver.calls().empty());
}

TEST(an_event_that_fails_drops_its_requests) {
  HintMachine machine;
  const EventId event = machine.busy_event(kStream);
  machine.driver.fail("query", 9);
  machine.expect(machine.evict(blocks(0, 1), event), Outcome::dropped);
  machine.expect(machine.prefetch(blocks(0, 1), event), Outcome::dropped);
  machine.engine.release(event);
  CHECK(machine.driver.calls().empty());
  CHECK_EQUAL(machine.engine.statistics().failures.at(0).call, std::string("query"));
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// All workers in the driver, thousands of requests queued: the caller notices neither.
TEST(submitting_does_not_wait) {
  HintMachine machine({.chunk_bytes = 2 * MiB, .capacity = 20'000});
  machine.driver.hold("prefetch");
  machine.driver.hold("evict");
  machine.prefetch(blocks(0, 1));
  machine.prefetch(blocks(10, 1));
  machine.evict(blocks(20, 1));
  machine.driver.wait_until_held("prefetch", 2);
  machine.driver.wait_until_held("evict");
  const EventId event = machine.busy_event(kStream);
  std::vector<double> submit_ns;
  for (std::size_t i = 0; i < 10'000; ++i) {
    const std::int64_t before = now_ns();
    CHECK(machine.ask(i % 2 ? HintOp::evict : HintOp::prefetch, blocks(30 + i % 100, 4),
                      i % 3 ? event : 0) != 0);
    submit_ns.push_back(static_cast<double>(now_ns() - before));
  }
  std::cout << "submit: " << median(submit_ns) << " ns in the middle" << std::endl;
  CHECK(median(submit_ns) < kSubmitNs);
  machine.engine.release(event);
  machine.driver.let_go("prefetch");
  machine.driver.let_go("evict");
  machine.driver.finish(0, kStream);
}

}  // namespace
}  // namespace umem
