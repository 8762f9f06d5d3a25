// Bytes in flight are bounded, and prefetches wait for the evictions that they come after.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

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

// A prefetch that comes after an older eviction.
Ticket prefetch_after(HintMachine& machine, Ticket eviction, Range range, int device = 0) {
  return machine.ask_behind(HintOp::prefetch, range, 7, device, eviction);
}

// Each entry as soon as what it comes after has ended, in whatever way.
TEST(a_prefetch_comes_after_what_it_names) {
  HintMachine machine(kOneLane);
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
  HintMachine machine(kOneLane);
  machine.driver.launch(0, 7);
  const Ticket in = prefetch_after(machine, 1000, blocks(100, 1));
  const Ticket out = machine.ask_behind(HintOp::evict, blocks(0, 1));
  machine.driver.hold("evict");
  machine.driver.finish(0, 7);
  machine.driver.wait_until_held("evict");
  machine.expect_done(in);
  machine.expect_open(out);
  machine.driver.let_go("evict");
  machine.expect_done(out);
}

// It has no event yet, but is the older one.
TEST(an_eviction_is_waited_for_before_its_event_too) {
  HintMachine machine(kOneLane);
  const Ticket out = machine.ask_behind_work(HintOp::evict, blocks(0, 4), 8);
  const Ticket in = prefetch_after(machine, out, blocks(100, 4));
  machine.expect_open(in);
  machine.driver.finish(0, 8);
  machine.expect_done(out, in);
}

// Each way in which what was waited for may end without making room.
TEST(whoever_waits_for_an_eviction_learns_that_none_comes) {
  HintMachine machine(kOneLane);
  const auto waiting_behind = [&](Ticket out) {
    const Ticket in = prefetch_after(machine, out, blocks(100, 1));
    machine.expect_open(out);
    machine.expect_open(in);
    return in;
  };
  Ticket in = waiting_behind(machine.ask_behind_work(HintOp::evict, blocks(0, 4), 8));
  CHECK(machine.engine.forget(blocks(0, 4), kPatienceNs));
  machine.expect_done(in);

  in = waiting_behind(machine.ask_behind_work(HintOp::evict, blocks(0, 4), 8));
  machine.driver.fail("query", 3);
  machine.expect_done(in);

  const Ticket out = machine.hold(HintOp::evict, blocks(0, 4));
  in = waiting_behind(out);
  machine.driver.fail("evict", 4);
  machine.driver.let_go("evict");
  machine.expect(out, Outcome::failed);
  machine.expect_done(in);
}

TEST(a_device_that_waits_holds_up_no_other) {
  HintMachine machine(kOneLane);
  const Ticket out = machine.hold(HintOp::evict, blocks(0, 1));
  const Ticket to_0 = prefetch_after(machine, out, blocks(10, 1));
  const Ticket to_1 = prefetch_after(machine, out, blocks(20, 1), 1);  // evicted from another
  machine.expect_done(to_1);
  machine.expect_open(to_0);
  machine.driver.let_go("evict");
  machine.expect_done(out, to_0);
}

// Not as a neighbour of one that may go, either.
TEST(no_neighbour_overtakes_who_waits) {
  HintMachine machine(kOneLane);
  const Ticket out = machine.ask_behind_work(HintOp::evict, blocks(0, 2), 8);
  HintBatch batch(0, {{.op = HintOp::prefetch, .range = blocks(100, 1)},
                      {.op = HintOp::prefetch, .range = blocks(200, 3)},
                      {.op = HintOp::prefetch, .range = blocks(101, 1)}});
  const TicketSpan in = machine.engine.submit_batch(batch, 7, std::vector<Ticket>{0, out, 0});
  machine.expect_done(in.first);
  machine.expect_open(in.first + 1);
  machine.expect_open(in.last);
  machine.driver.finish(0, 8);
  machine.expect_done(out, in.first + 1, in.last);
}

// Ten times the room through it, out just ahead of in.
TEST(a_step_never_passes_its_room) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 16 * MiB});
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 40; ++i) {
    const Ticket out = i < 3 ? 0 : machine.evict(blocks(100 * (i - 3), 4));
    if (out != 0) tickets.push_back(out);
    tickets.push_back(prefetch_after(machine, out, blocks(100 * i, 4)));
    // The plan evicts what has come: a request that overtook its prefetch would replace it.
    machine.expect_done(tickets.back());
  }
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  CHECK_EQUAL(machine.driver.peak_blocks(), 12U);
}

}  // namespace
}  // namespace umem
