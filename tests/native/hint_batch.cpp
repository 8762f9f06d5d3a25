// Batches: checked once, submitted with one event and consecutive tickets, refused from the end.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

HintRequest entry(HintOp op, Range range) { return {.op = op, .range = range}; }

// `count` prefetches of 2 MiB that do not touch.
std::vector<HintRequest> apart(std::size_t count) {
  std::vector<HintRequest> requests;
  for (std::size_t i = 0; i < count; ++i)
    requests.push_back(entry(HintOp::prefetch, blocks(2 * i, 1)));
  return requests;
}

TEST(one_event_and_consecutive_tickets) {
  HintMachine machine;
  HintBatch batch(0, {entry(HintOp::prefetch, blocks(0, 1)), entry(HintOp::evict, blocks(4, 1)),
                      entry(HintOp::prefetch, blocks(8, 1))});
  CHECK_EQUAL(batch.size(), 3U);
  CHECK(batch.tickets().last < batch.tickets().first);
  machine.driver.launch(0, 7);
  const TicketSpan span = machine.engine.submit_batch(batch, 7);
  CHECK_EQUAL(span.last - span.first, 2U);
  CHECK_EQUAL(machine.driver.count("record"), 1U);
  for (Ticket ticket = span.first; ticket <= span.last; ++ticket) machine.expect_open(ticket);
  machine.driver.finish(0, 7);
  for (Ticket ticket = span.first; ticket <= span.last; ++ticket)
    machine.expect_done(ticket);
  CHECK_EQUAL(machine.driver.count("prefetch"), 2U);
  CHECK_EQUAL(machine.driver.count("evict"), 1U);
  CHECK_EQUAL(machine.driver.events(), 0U);  // released by the engine itself

  const TicketSpan again = machine.engine.submit_batch(batch, 7);
  CHECK_EQUAL(again.first, span.last + 1);
  CHECK_EQUAL(batch.tickets().last, again.last);
  machine.expect_done(again.last);
}

TEST(an_entry_without_an_address_is_skipped) {
  HintMachine machine;
  HintBatch batch(0, apart(4));
  batch.set_address(1, 0);
  batch.set_address(2, at(100));
  TicketSpan span = machine.engine.submit_batch(batch, 7);
  CHECK_EQUAL(span.last - span.first, 2U);
  // Two workers end them, in any order.
  machine.expect_done(span.first, span.first + 1, span.last);
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK_EQUAL(std::count_if(calls.begin(), calls.end(),
                            [](const HintCall& call) { return call.range == blocks(100, 1); }),
              1);
  CHECK_EQUAL(calls.size(), 3U);

  for (std::size_t i = 0; i < 4; ++i) batch.set_address(i, 0);
  span = machine.engine.submit_batch(batch, 7);
  CHECK(span.last < span.first);
  CHECK_EQUAL(machine.driver.count("record"), 1U);  // nothing to wait for
  CHECK_EQUAL(machine.engine.statistics().refused, 0U);
}

TEST(a_full_queue_refuses_the_last_ones) {
  HintMachine machine({.capacity = 5, .prefetch_workers = 1});
  machine.driver.hold("prefetch");
  HintBatch batch(0, apart(8));
  const TicketSpan span = machine.engine.submit_batch(batch, 7);
  CHECK_EQUAL(span.last + 1 - span.first, 5U);
  CHECK_EQUAL(machine.engine.statistics().refused, 3U);
  const TicketSpan none = machine.engine.submit_batch(batch, 7);
  CHECK(none.last < none.first);
  CHECK_EQUAL(machine.engine.statistics().refused, 11U);
  machine.driver.let_go("prefetch");
  for (Ticket ticket = span.first; ticket <= span.last; ++ticket)
    machine.expect_done(ticket);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

TEST(what_entries_come_after_is_told_of_each_or_of_none) {
  HintMachine machine;
  HintBatch batch(0, apart(2));
  const std::vector<Ticket> too_few{1};
  CHECK_THROWS(std::invalid_argument, machine.engine.submit_batch(batch, 7, too_few));
  CHECK_EQUAL(machine.driver.count("record"), 0U);
}

TEST(without_an_event_all_are_dropped) {
  HintMachine machine;
  machine.driver.fail("record", 1);
  HintBatch batch(0, apart(2));
  const TicketSpan span = machine.engine.submit_batch(batch, 7);
  machine.expect(span.first, Outcome::dropped);
  machine.expect(span.last, Outcome::dropped);
  CHECK_EQUAL(machine.driver.calls().size(), 0U);
}

TEST(after_the_end_all_are_refused) {
  HintMachine machine;
  machine.engine.shutdown(kPatienceNs);
  HintBatch batch(0, apart(3));
  const TicketSpan span = machine.engine.submit_batch(batch, 7);
  CHECK(span.last < span.first);
  CHECK_EQUAL(machine.engine.statistics().refused, 3U);
  CHECK_EQUAL(machine.driver.count("record"), 0U);
}

TEST(what_cannot_be_meant_is_refused) {
  CHECK_THROWS(std::invalid_argument, HintBatch(-1, apart(1)));
  CHECK_THROWS(std::invalid_argument, HintBatch(0, {entry(HintOp::advise, blocks(0, 1))}));
  CHECK_THROWS(std::invalid_argument, HintBatch(0, {entry(HintOp::evict, {at(0), 0})}));
  CHECK_THROWS(std::invalid_argument, HintBatch(0, {entry(HintOp::evict, {at(0), SIZE_MAX})}));
  HintBatch batch(0, apart(2));
  CHECK_THROWS(std::out_of_range, batch.set_address(2, at(0)));
  CHECK_THROWS(std::invalid_argument, batch.set_address(0, UINTPTR_MAX - 5));
  HintMachine machine;
  const TicketSpan span = machine.engine.submit_batch(batch, 7);
  machine.expect_done(span.first, span.last);
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK(calls[0].range == blocks(0, 1) || calls[1].range == blocks(0, 1));  // as before
}

TEST(addresses_may_change_while_others_fire) {
  HintMachine machine;
  HintBatch batch(0, apart(16));
  std::atomic<bool> stop{false};
  std::thread changing([&] {
    for (std::size_t i = 0; !stop; ++i) batch.set_address(i % 16, i % 3 ? at(i % 1000) : 0);
  });
  Ticket last = 0;
  for (int i = 0; i < 200; ++i)
    if (const TicketSpan span = machine.engine.submit_batch(batch, 7); span.last >= span.first)
      last = span.last;
  stop = true;
  changing.join();
  CHECK(machine.engine.wait(last, kPatienceNs) != Outcome::open);
}

}  // namespace
}  // namespace umem
