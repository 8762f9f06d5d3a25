// A freed range: its requests are dropped, and no driver call works on it.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

TEST(what_is_queued_is_dropped) {
  HintMachine machine(kOneLane);
  const Ticket busy = machine.hold(HintOp::prefetch, blocks(500, 1));
  const Ticket whole = machine.prefetch(blocks(0, 2));
  const Ticket part = machine.prefetch(blocks(10, 10));
  CHECK(machine.engine.forget(blocks(0, 12), kPatienceNs));
  machine.driver.unmap(blocks(0, 12));
  machine.expect(whole, Outcome::forgotten);
  machine.driver.let_go("prefetch");
  machine.expect_done(busy);
  machine.expect(part, Outcome::forgotten);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).wasted_bytes, 8 * MiB);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).moved_bytes, 18 * MiB);
}

TEST(it_waits_for_the_running_call) {
  HintMachine machine(kOneLane);
  const Ticket ticket = machine.hold(HintOp::evict, blocks(0, 12));
  CHECK(!machine.engine.forget(blocks(2, 1), kSoonNs));  // bounded: the driver is still at it
  std::atomic<bool> returned{false};
  std::thread freeing([&] {
    CHECK(machine.engine.forget(blocks(0, 12), kPatienceNs));
    returned = true;
    machine.driver.unmap(blocks(0, 12));
  });
  std::this_thread::sleep_for(std::chrono::nanoseconds(kSoonNs));
  CHECK(!returned);
  machine.driver.let_go("evict");
  freeing.join();
  machine.expect(ticket, Outcome::forgotten);
  CHECK_EQUAL(machine.driver.count("evict"), 1U);
}

// The call has returned, but what it asked for is done by the device later.
TEST(it_waits_for_the_device_too) {
  HintMachine machine(kOneLane);
  machine.driver.hold("synchronize");
  machine.prefetch(blocks(0, 1));
  machine.driver.wait_until_held("synchronize");
  CHECK(!machine.engine.forget(blocks(0, 1), kSoonNs));
  machine.driver.let_go("synchronize");
  CHECK(machine.engine.forget(blocks(0, 1), kPatienceNs));
}

TEST(it_does_not_wait_for_other_ranges) {
  HintMachine machine(kOneLane);
  const Ticket ticket = machine.hold(HintOp::evict, blocks(0, 4));
  CHECK(machine.engine.forget(blocks(4, 4), 0));
  machine.driver.let_go("evict");
  machine.expect_done(ticket);
}

TEST(it_does_not_wait_for_events) {
  HintMachine machine(kOneLane);
  const Ticket ticket = machine.ask_behind_work(HintOp::prefetch, blocks(0, 4));
  machine.expect_open(ticket);
  CHECK(machine.engine.forget(blocks(0, 4), kPatienceNs));
  machine.expect(ticket, Outcome::forgotten);
  // The event is nobody's any more, though its stream never got to it.
  machine.engine.wait(machine.prefetch(blocks(9, 1)), kPatienceNs);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

TEST(the_range_may_be_used_again) {
  HintMachine machine(kOneLane);
  for (int i = 0; i < 50; ++i) {
    machine.driver.map_again(blocks(0, 8));
    machine.prefetch(blocks(0, 8));
    machine.evict(blocks(4, 8));
    CHECK(machine.engine.forget(blocks(0, 8), kPatienceNs));
    machine.driver.unmap(blocks(0, 8));
  }
  machine.driver.map_again(blocks(0, 8));
  machine.expect_done(machine.prefetch(blocks(0, 8)));
}

}  // namespace
}  // namespace umem
