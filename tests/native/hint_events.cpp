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
  const Ticket waiting = machine.ask_behind_work(HintOp::prefetch, blocks(0, 1), kStream);
  machine.expect_done(machine.prefetch(blocks(10, 1)));  // waits for nothing: goes ahead
  machine.expect_open(waiting);
  CHECK_EQUAL(machine.driver.count("prefetch"), 1U);
  machine.driver.finish(0, kStream);
  machine.expect_done(waiting);
  machine.expect_done(machine.ask_behind(HintOp::prefetch, blocks(20, 1), kStream));  // over already
}

TEST(streams_do_not_wait_for_each_other) {
  HintMachine machine;
  const Ticket on_one = machine.ask_behind_work(HintOp::prefetch, blocks(0, 1), kStream);
  const Ticket on_other = machine.ask_behind_work(HintOp::prefetch, blocks(10, 1), kOtherStream);
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
  for (std::size_t i = 0; i < 200; ++i)
    tickets.push_back(machine.ask_behind_work(HintOp::prefetch, blocks(2 * i, 1), kStream));
  machine.expect_open(tickets.back());
  const std::size_t before = machine.driver.count("query");
  machine.expect_open(tickets.back());
  // One look each poll, by one worker: 20 or so in 20 ms, and a few for late wake-ups.
  CHECK(machine.driver.count("query") - before <= 60);
  machine.driver.finish(0, kStream);
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
}

// Whether its requests are done, replaced or refused.
TEST(events_are_given_back) {
  HintMachine machine({.capacity = 8});
  HintBatch batch(0, {{.op = HintOp::prefetch, .range = blocks(0, 1)},
                      {.op = HintOp::evict, .range = blocks(0, 1)}});
  for (int i = 0; i < 20; ++i) {
    const TicketSpan span = machine.engine.submit_batch(batch, kStream);
    machine.engine.wait(span.first, kPatienceNs);
    machine.engine.wait(span.last, kPatienceNs);
  }
  machine.driver.hold("evict");
  for (std::size_t i = 0; i < 10; ++i) machine.evict(blocks(10 * i, 1));
  const TicketSpan none = machine.engine.submit_batch(batch, kStream);
  CHECK(none.last < none.first);
  machine.driver.let_go("evict");
  while (machine.engine.statistics().open_requests != 0) std::this_thread::yield();
  CHECK_EQUAL(machine.driver.events(), 0U);
}

// Without an event nobody knows when the work is over: such a request is not risked.
TEST(no_event_means_no_hint) {
  HintMachine machine;
  machine.driver.fail("record", 5);
  machine.expect(machine.ask_behind(HintOp::evict, blocks(0, 1)), Outcome::dropped);
  CHECK(machine.driver.calls().empty());
}

TEST(an_event_that_fails_drops_its_requests) {
  HintMachine machine;
  machine.driver.launch(0, kStream);
  HintBatch batch(0, {{.op = HintOp::evict, .range = blocks(0, 1)},
                      {.op = HintOp::prefetch, .range = blocks(10, 1)}});
  machine.driver.fail("query", 9);
  const TicketSpan span = machine.engine.submit_batch(batch, kStream);
  machine.expect(span.first, Outcome::dropped);
  machine.expect(span.last, Outcome::dropped);
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
  std::vector<double> submit_ns;
  for (std::size_t i = 0; i < 10'000; ++i) {
    const std::int64_t before = now_ns();
    CHECK(machine.ask(i % 2 ? HintOp::evict : HintOp::prefetch, blocks(30 + i % 100, 4)) != 0);
    submit_ns.push_back(static_cast<double>(now_ns() - before));
  }
  std::cout << "submit: " << median(submit_ns) << " ns in the middle" << std::endl;
  CHECK(median(submit_ns) < kSubmitNs);
  machine.driver.let_go("prefetch");
  machine.driver.let_go("evict");
}

}  // namespace
}  // namespace umem
