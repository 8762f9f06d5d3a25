// Bytes in flight are bounded, and prefetches wait for free memory.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr HintSettings kSmall{.chunk_bytes = 8 * MiB, .in_flight_bytes = 16 * MiB};

TEST(bytes_in_flight_are_bounded) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 12 * MiB, .prefetch_workers = 4});
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 50; ++i) tickets.push_back(machine.prefetch(blocks(20 * i, 5)));
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  CHECK(machine.driver.peak_busy_bytes(Direction::to_device) <= 12 * MiB);
  CHECK(machine.driver.peak_busy_bytes(Direction::to_device) >= 8 * MiB);
}

TEST(a_bound_below_the_chunk_makes_chunks_smaller) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 4 * MiB});
  machine.expect_done(machine.prefetch(blocks(0, 10)));
  CHECK_EQUAL(machine.driver.peak_busy_bytes(Direction::to_device), 4 * MiB);
}

TEST(a_prefetch_waits_for_evictions_to_end) {
  HintMachine machine(kSmall);
  machine.fill(16 * MiB, blocks(0, 8));
  const Ticket out = machine.hold(HintOp::evict, blocks(0, 4));
  const Ticket in = machine.prefetch(blocks(100, 4));
  machine.expect_open(in);
  CHECK_EQUAL(machine.driver.count("prefetch"), 0U);
  CHECK_EQUAL(machine.engine.statistics().room_waits, 1U);
  machine.driver.let_go("evict");
  machine.expect_done(out, in);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 16 * MiB);
}

// While an eviction is under way that was asked for before.
TEST(room_may_come_from_the_caller) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  machine.driver.hold("evict");
  const Ticket out = machine.evict(blocks(1000, 1));
  const Ticket in = machine.prefetch(blocks(100, 4));
  machine.expect_open(in);
  machine.engine.set_resident(0, blocks(0, 4), false);
  machine.expect_done(in);
  const Ticket another = machine.prefetch(blocks(200, 2));
  machine.expect_open(another);
  machine.engine.set_budget(0, 12 * MiB);
  machine.expect_done(another);
  const Ticket third = machine.prefetch(blocks(300, 1));
  machine.expect_open(third);
  CHECK(machine.engine.forget(blocks(100, 1), kPatienceNs));  // freed: no longer resident
  machine.expect_done(third);
  machine.engine.set_budget(0, 0);
  machine.expect_done(machine.prefetch(blocks(400, 100)));
  CHECK_EQUAL(machine.engine.statistics().over_budget_bytes, 0U);
  machine.driver.let_go("evict");
  machine.expect_done(out);
}

TEST(what_is_resident_needs_no_room) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  machine.expect_done(machine.prefetch(blocks(0, 4)));
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 8 * MiB);
}

TEST(a_prefetch_goes_over_the_budget_when_no_room_can_come) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 3));
  machine.expect_done(machine.prefetch(blocks(100, 4)));
  HintStatistics stats = machine.engine.statistics();
  CHECK_EQUAL(stats.over_budget_bytes, 6 * MiB);
  CHECK_EQUAL(stats.room_waits, 0U);
  CHECK_EQUAL(stats.resident_bytes.at(0), 14 * MiB);
  machine.expect_done(machine.prefetch(blocks(200, 2)));
  CHECK_EQUAL(machine.engine.statistics().over_budget_bytes, 10 * MiB);
}

// Its event may come after work that waits for the prefetch.
TEST(a_later_eviction_is_not_waited_for) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  const Ticket in = machine.hold(HintOp::prefetch, blocks(100, 4));
  const Ticket behind = machine.prefetch(blocks(200, 20));
  const Ticket out = machine.ask_behind_work(HintOp::evict, blocks(0, 4));
  machine.driver.let_go("prefetch");
  machine.expect_done(in, behind);
  CHECK_EQUAL(machine.engine.statistics().over_budget_bytes, 48 * MiB);
  machine.expect_open(out);
  machine.driver.finish(0, 7);
  machine.expect_done(out);
}

TEST(an_older_eviction_is_waited_for_before_its_event_too) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  const Ticket out = machine.ask_behind_work(HintOp::evict, blocks(0, 4));
  const Ticket in = machine.prefetch(blocks(100, 4));
  machine.expect_open(in);
  machine.driver.finish(0, 7);
  machine.expect_done(out, in);
  CHECK_EQUAL(machine.engine.statistics().over_budget_bytes, 0U);
}

// Each way in which what was waited for may end without making room.
TEST(whoever_waits_for_room_learns_that_none_comes) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  const auto waiting_behind = [&](Ticket out) {
    const Ticket in = machine.prefetch(blocks(100, 1));
    machine.expect_open(out);
    machine.expect_open(in);
    return in;
  };
  const EventId event = machine.busy_event();
  Ticket in = waiting_behind(machine.evict(blocks(0, 4), event));
  CHECK(machine.engine.forget(blocks(0, 4), kPatienceNs));
  machine.expect_done(in);

  machine.engine.set_resident(0, blocks(0, 4), true);
  in = waiting_behind(machine.evict(blocks(0, 4), event));
  machine.engine.release(event);
  machine.driver.fail("query", 3);
  machine.expect_done(in);

  const Ticket out = machine.hold(HintOp::evict, blocks(0, 4));
  in = waiting_behind(out);
  machine.driver.fail("evict", 4);
  machine.driver.let_go("evict");
  machine.expect(out, Outcome::failed);
  machine.expect_done(in);
}

TEST(advice_makes_no_room) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  machine.driver.hold("advise");
  const Ticket advice = machine.ask(HintOp::advise, blocks(0, 4));
  machine.expect_done(machine.prefetch(blocks(100, 4)));
  machine.driver.let_go("advise");
  machine.expect_done(advice);
}

TEST(a_full_device_holds_up_no_other) {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 2 * MiB);
  machine.engine.set_budget(1, 64 * MiB);
  machine.engine.set_resident(0, blocks(0, 1), true);
  const Ticket out = machine.hold(HintOp::evict, blocks(0, 1));
  const Ticket to_0 = machine.ask(HintOp::prefetch, blocks(10, 1), 0, 0);
  machine.expect_done(machine.ask(HintOp::prefetch, blocks(20, 1), 0, 1));
  machine.expect_open(to_0);
  machine.driver.let_go("evict");
  machine.expect_done(out, to_0);
}

TEST(nobody_overtakes_who_waits_for_room) {
  HintMachine machine(kSmall);
  machine.fill(8 * MiB, blocks(0, 4));
  machine.driver.hold("evict");
  const Ticket small = machine.evict(blocks(0, 1)), large = machine.evict(blocks(2, 2));
  const Ticket first = machine.prefetch(blocks(100, 3));
  const Ticket second = machine.prefetch(blocks(200, 1));
  machine.driver.wait_until_held("evict");
  machine.driver.let_one_go("evict");
  machine.expect_done(small);
  machine.expect_open(second);  // its 2 MiB are kept for the first
  machine.expect_open(first);
  machine.driver.let_go("evict");
  machine.expect_done(large, first, second);
  CHECK_EQUAL(machine.engine.statistics().over_budget_bytes, 2 * MiB);
}

// Not as a neighbour of one that may go, either.
TEST(no_neighbour_overtakes_who_waits_for_room) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .prefetch_workers = 1});
  machine.fill(8 * MiB, blocks(0, 2));
  const EventId never = machine.busy_event();
  const Ticket out = machine.evict(blocks(0, 2), never);
  const EventId event = machine.busy_event(8);
  const Ticket first = machine.prefetch(blocks(100, 1), event);
  const Ticket waits = machine.prefetch(blocks(200, 3), event);
  const Ticket later = machine.prefetch(blocks(101, 1), event);
  machine.driver.finish(0, 8);
  machine.expect_done(first);
  machine.expect_open(waits);
  machine.expect_open(later);
  machine.driver.finish(0, 7);
  machine.engine.release(never);
  machine.engine.release(event);
  for (const Ticket ticket : {out, waits, later}) machine.expect_done(ticket);
}

// Without a budget: each entry as soon as what it comes after has ended, in whatever way.
TEST(a_prefetch_comes_after_what_it_names) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .prefetch_workers = 1});
  machine.driver.hold("evict");
  const Ticket first = machine.evict(blocks(0, 1)), second = machine.evict(blocks(4, 1));
  const Ticket third = machine.evict(blocks(8, 1));
  machine.driver.wait_until_held("evict");
  HintBatch batch(0, {{.op = HintOp::prefetch, .range = blocks(100, 1)},
                      {.op = HintOp::prefetch, .range = blocks(101, 1)},
                      {.op = HintOp::prefetch, .range = blocks(104, 1)},
                      {.op = HintOp::prefetch, .range = blocks(108, 1)}});
  const std::vector<Ticket> after{0, first, first, third};
  const TicketSpan in = machine.engine.submit_batch(batch, 7, after);
  machine.expect_done(in.first);
  machine.expect_open(in.first + 1);  // its neighbour is not brought in with it
  const Ticket later = machine.prefetch(blocks(200, 1));
  machine.expect_open(later);  // nor does anything else pass
  machine.driver.let_one_go("evict");
  machine.expect_done(first);
  for (Ticket ticket = in.first + 1; ticket < in.last; ++ticket)
    machine.expect_done(ticket);
  machine.expect_open(in.last);
  CHECK(machine.engine.forget(blocks(8, 1), kPatienceNs));
  machine.expect(third, Outcome::forgotten);
  machine.expect_open(in.last);  // the second one is older, and not over
  machine.driver.let_go("evict");
  machine.expect_done(second, in.last, later);
}

// A thread that waits for the prefetch would never ask for it.
TEST(nothing_comes_after_what_is_not_asked_for_yet) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .prefetch_workers = 1});
  const EventId event = machine.busy_event();
  HintBatch batch(0, {{.op = HintOp::prefetch, .range = blocks(100, 1)}});
  const std::vector<Ticket> after{1000};
  const TicketSpan in = machine.engine.submit_batch(batch, 7, after);
  const Ticket out = machine.evict(blocks(0, 1), event);
  machine.driver.hold("evict");
  machine.driver.finish(0, 7);
  machine.driver.wait_until_held("evict");
  machine.expect_done(in.first);
  machine.expect_open(out);
  machine.driver.let_go("evict");
  machine.expect_done(out);
  machine.engine.release(event);
}

TEST(a_page_is_on_one_device) {
  HintMachine machine;
  const auto resident = [&](int device) {
    return machine.engine.statistics().resident_bytes.at(device);
  };
  machine.expect_done(machine.ask(HintOp::prefetch, blocks(0, 4), 0, 0));
  machine.expect_done(machine.ask(HintOp::prefetch, blocks(1, 1), 0, 1));
  CHECK_EQUAL(resident(0), 6 * MiB);
  CHECK_EQUAL(resident(1), 2 * MiB);
  machine.expect_done(machine.ask(HintOp::evict, blocks(0, 2), 0, 0));
  CHECK_EQUAL(resident(0), 4 * MiB);
  CHECK_EQUAL(resident(1), 0U);
}

TEST(a_failed_prefetch_gives_its_room_back) {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 8 * MiB);
  machine.driver.fail("prefetch", 3);
  machine.expect(machine.prefetch(blocks(0, 4)), Outcome::failed);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 0U);
  machine.expect_done(machine.prefetch(blocks(10, 4)));
}

// Ten times the budget through it, out just ahead of in.
TEST(a_step_never_passes_its_budget) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 16 * MiB});
  machine.engine.set_budget(0, 32 * MiB);
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 40; ++i) {
    if (i >= 3) tickets.push_back(machine.evict(blocks(100 * (i - 3), 4)));
    tickets.push_back(machine.prefetch(blocks(100 * i, 4)));
    // The plan evicts what has come: a request that overtook its prefetch would replace it.
    machine.expect_done(tickets.back());
  }
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  CHECK(machine.driver.peak_blocks() <= 16);
  CHECK(machine.driver.peak_blocks() >= 12);
  CHECK_EQUAL(machine.engine.statistics().over_budget_bytes, 0U);
}

}  // namespace
}  // namespace umem
