// How much may be on its way at once, and what a prefetch does where there is no room.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr HintSettings kSmall{.chunk_bytes = 8 * MiB, .in_flight_bytes = 16 * MiB};

void bytes_in_flight_are_bounded() {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 12 * MiB, .prefetch_workers = 4});
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 50; ++i) tickets.push_back(machine.prefetch(blocks(20 * i, 5)));
  for (const Ticket ticket : tickets) machine.expect(ticket, Outcome::done);
  CHECK(machine.driver.peak_busy_bytes(Direction::to_device) <= 12 * MiB);
  CHECK(machine.driver.peak_busy_bytes(Direction::to_device) >= 8 * MiB);
}

void a_bound_below_the_chunk_makes_chunks_smaller() {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 4 * MiB});
  machine.expect(machine.prefetch(blocks(0, 10)), Outcome::done);
  CHECK_EQUAL(machine.driver.peak_busy_bytes(Direction::to_device), 4 * MiB);
}

void a_prefetch_waits_for_evictions_to_end() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 16 * MiB);
  machine.engine.set_resident(0, blocks(0, 8), true);
  machine.driver.hold("evict");
  const Ticket out = machine.evict(blocks(0, 4));
  machine.driver.wait_until_held("evict");
  const Ticket in = machine.prefetch(blocks(100, 4));
  machine.expect_open(in);
  CHECK_EQUAL(machine.driver.count("prefetch"), 0U);
  CHECK_EQUAL(machine.engine.statistics().room_waits, 1U);
  machine.driver.let_go("evict");
  machine.expect(out, Outcome::done);
  machine.expect(in, Outcome::done);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 16 * MiB);
}

void room_may_come_from_the_caller() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 8 * MiB);
  machine.engine.set_resident(0, blocks(0, 4), true);
  const Ticket in = machine.prefetch(blocks(100, 4));
  machine.expect_open(in);
  machine.engine.set_resident(0, blocks(0, 4), false);
  machine.expect(in, Outcome::done);
  const Ticket another = machine.prefetch(blocks(200, 2));
  machine.expect_open(another);
  machine.engine.set_budget(0, 12 * MiB);
  machine.expect(another, Outcome::done);
  const Ticket third = machine.prefetch(blocks(300, 1));
  machine.expect_open(third);
  CHECK(machine.engine.forget(blocks(100, 1), kPatienceNs));  // freed: no longer resident
  machine.expect(third, Outcome::done);
  machine.engine.set_budget(0, 0);
  machine.expect(machine.prefetch(blocks(400, 100)), Outcome::done);
}

void what_is_resident_needs_no_room() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 8 * MiB);
  machine.engine.set_resident(0, blocks(0, 4), true);
  machine.expect(machine.prefetch(blocks(0, 4)), Outcome::done);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 8 * MiB);
}

void what_fits_is_taken_when_no_more_room_can_come() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 8 * MiB);
  machine.engine.set_resident(0, blocks(0, 3), true);
  const Ticket in = machine.prefetch(blocks(100, 4));
  machine.expect_open(in);
  CHECK_EQUAL(machine.driver.calls().size(), 1U);
  CHECK(machine.driver.calls()[0].range == blocks(100, 1));
  machine.expect(machine.evict(blocks(0, 3)), Outcome::done);
  machine.expect(in, Outcome::done);
}

void a_full_device_holds_up_no_other() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 2 * MiB);
  machine.engine.set_budget(1, 64 * MiB);
  machine.engine.set_resident(0, blocks(0, 1), true);
  const Ticket to_0 = machine.ask(HintOp::prefetch, blocks(10, 1), 0, 0);
  machine.expect(machine.ask(HintOp::prefetch, blocks(20, 1), 0, 1), Outcome::done);
  machine.expect_open(to_0);
  machine.expect(machine.ask(HintOp::discard, blocks(0, 1), 0, 0), Outcome::done);
  machine.expect(to_0, Outcome::done);
}

void nobody_overtakes_who_waits_for_room() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 8 * MiB);
  machine.engine.set_resident(0, blocks(0, 4), true);
  const Ticket first = machine.prefetch(blocks(100, 4));
  const Ticket second = machine.prefetch(blocks(200, 1));
  machine.expect(machine.evict(blocks(0, 1)), Outcome::done);
  machine.expect_open(second);  // its 2 MiB went to the first
  machine.expect_open(first);
  machine.expect(machine.evict(blocks(1, 3)), Outcome::done);
  machine.expect(first, Outcome::done);
  machine.expect_open(second);
}

void a_failed_prefetch_gives_its_room_back() {
  HintMachine machine(kSmall);
  machine.engine.set_budget(0, 8 * MiB);
  machine.driver.fail("prefetch", 3);
  machine.expect(machine.prefetch(blocks(0, 4)), Outcome::failed);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 0U);
  machine.expect(machine.prefetch(blocks(10, 4)), Outcome::done);
}

// Ten times the budget through it, out just ahead of in.
void a_step_never_passes_its_budget() {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 16 * MiB});
  machine.engine.set_budget(0, 32 * MiB);
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 40; ++i) {
    if (i >= 3) tickets.push_back(machine.evict(blocks(100 * (i - 3), 4)));
    tickets.push_back(machine.prefetch(blocks(100 * i, 4)));
    // The plan evicts what has come: a request that overtook its prefetch would replace it.
    machine.expect(tickets.back(), Outcome::done);
  }
  for (const Ticket ticket : tickets) machine.expect(ticket, Outcome::done);
  CHECK(machine.driver.peak_blocks() <= 16);
  CHECK(machine.driver.peak_blocks() >= 12);
}

}  // namespace
}  // namespace umem

int main() {
  using namespace umem;
  RUN(bytes_in_flight_are_bounded);
  RUN(a_bound_below_the_chunk_makes_chunks_smaller);
  RUN(a_prefetch_waits_for_evictions_to_end);
  RUN(room_may_come_from_the_caller);
  RUN(what_is_resident_needs_no_room);
  RUN(what_fits_is_taken_when_no_more_room_can_come);
  RUN(a_full_device_holds_up_no_other);
  RUN(nobody_overtakes_who_waits_for_room);
  RUN(a_failed_prefetch_gives_its_room_back);
  RUN(a_step_never_passes_its_budget);
}
