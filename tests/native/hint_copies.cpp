// Copies carry values: they keep their order, and a failed copy loses nothing.
#include <cstring>
#include <numeric>

#include "fake_hint_driver.hpp"
#include "hints/host_hint_driver.hpp"

namespace umem {
namespace {

constexpr std::uintptr_t kHost = std::uintptr_t{1} << 44;

Ticket copy(HintMachine& machine, HintOp op, Range range, std::uintptr_t host = kHost) {
  return machine.engine.submit({.op = op, .range = range, .host_address = host});
}

std::string names(FakeHintDriver& driver) {
  std::string all;
  for (const HintCall& call : driver.calls()) all += call.name + " ";
  return all;
}

TEST(out_copies_all_and_then_frees) {
  HintMachine machine(kOneLane);
  machine.engine.set_resident(0, blocks(0, 10), true);
  machine.expect_done(copy(machine, HintOp::copy_out, blocks(0, 10)));
  CHECK_EQUAL(names(machine.driver), std::string("copy copy copy discard "));
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK(calls[1].range == Range(kHost + 8 * MiB, 8 * MiB));
  CHECK_EQUAL(calls[1].from, at(4));
  CHECK(calls[3].range == blocks(0, 10));
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 0U);
}

TEST(in_brings_pages_and_then_copies) {
  HintMachine machine(kOneLane);
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 5)));
  CHECK_EQUAL(names(machine.driver), std::string("prefetch copy prefetch copy "));
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK(calls[3].range == blocks(4, 1));
  CHECK_EQUAL(calls[3].from, kHost + 8 * MiB);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 10 * MiB);
}

TEST(copies_keep_their_order) {
  HintMachine machine(kOneLane);
  machine.driver.hold("copy");
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 5));
  machine.driver.wait_until_held("copy");
  const Ticket in = copy(machine, HintOp::copy_in, blocks(0, 5));
  const Ticket hint = machine.prefetch(blocks(4, 1));  // not even a hint may come between
  machine.driver.let_one_go("copy");
  machine.expect_open(in);
  machine.expect_open(hint);
  machine.expect_open(out);
  machine.driver.let_go("copy");
  machine.expect_done(out, in, hint);
  CHECK_EQUAL(names(machine.driver),
              std::string("copy copy discard prefetch copy prefetch copy prefetch "));
}

TEST(copies_replace_hints_and_are_not_replaced) {
  HintMachine machine(kOneLane);
  machine.hold(HintOp::evict, blocks(100, 1));
  const Ticket hint = machine.evict(blocks(0, 1));
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 1));
  machine.expect(hint, Outcome::superseded);
  const Ticket in = machine.prefetch(blocks(0, 1));
  machine.expect_open(in);
  machine.driver.let_go("evict");
  machine.expect_done(out, in);
}

// Half of it is on the host only in the copy: the device still has all, and keeps it.
TEST(a_failed_copy_out_leaves_the_contents) {
  HintMachine machine(kOneLane);
  machine.driver.hold("copy");
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 12));
  machine.driver.wait_until_held("copy");
  machine.driver.let_one_go("copy");
  machine.driver.fail("copy", 4);
  machine.driver.let_go("copy");
  machine.expect(out, Outcome::failed);
  CHECK_EQUAL(machine.driver.count("discard"), 0U);

  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 12)));
  CHECK_EQUAL(machine.driver.count("prefetch"), 0U);  // there was nothing to bring back
  machine.expect(copy(machine, HintOp::copy_in, blocks(4, 2)), Outcome::failed);

  const std::size_t copies = machine.driver.count("copy");
  machine.expect_done(copy(machine, HintOp::copy_out, blocks(0, 12)));
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 12)));
  CHECK_EQUAL(machine.driver.count("copy"), copies + 6);
}

// What a copy out of a part has taken away is on the device no more; the rest still is.
TEST(a_part_that_left_is_not_there) {
  HintMachine machine(kOneLane);
  machine.driver.fail("copy", 4);
  machine.expect(copy(machine, HintOp::copy_out, blocks(0, 12)), Outcome::failed);
  constexpr std::uintptr_t kElsewhere = kHost + GiB;
  machine.expect_done(copy(machine, HintOp::copy_out, blocks(0, 2), kElsewhere));
  const std::size_t copies = machine.driver.count("copy");
  machine.expect(copy(machine, HintOp::copy_in, blocks(0, 12)), Outcome::failed);
  CHECK_EQUAL(machine.driver.count("copy"), copies);  // none over live contents
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 2), kElsewhere));
  CHECK_EQUAL(machine.driver.count("copy"), copies + 1);
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(2, 10), kHost + 4 * MiB));
  CHECK_EQUAL(machine.driver.count("copy"), copies + 1);  // it never left
}

TEST(parts_that_failed_are_all_there) {
  HintMachine machine(kOneLane);
  constexpr std::uintptr_t kElsewhere = kHost + GiB;
  machine.driver.fail("copy", 4, 2);
  machine.expect(copy(machine, HintOp::copy_out, blocks(0, 4)), Outcome::failed);
  machine.expect(copy(machine, HintOp::copy_out, blocks(0, 2), kElsewhere), Outcome::failed);
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 4)));
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 2), kElsewhere));
  CHECK_EQUAL(machine.driver.count("copy"), 2U);
  CHECK(machine.engine.forget(blocks(3, 1), kPatienceNs));
  machine.expect(copy(machine, HintOp::copy_in, blocks(0, 4)), Outcome::failed);
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(3, 1), kElsewhere));
  CHECK_EQUAL(machine.driver.count("copy"), 3U);
}

// A copy in that needs no copy ends without a call: whoever waits behind it hears of it.
TEST(a_copy_in_without_a_copy_keeps_nobody) {
  for (int round = 0; round < 20; ++round) {
    HintMachine machine(kOneLane);
    machine.driver.fail("copy", 4);
    machine.expect(copy(machine, HintOp::copy_out, blocks(0, 2)), Outcome::failed);
    const EventId event = machine.busy_event();
    const Ticket in = machine.engine.submit({.op = HintOp::copy_in,
                                             .range = blocks(0, 2),
                                             .event = event,
                                             .host_address = kHost});
    const Ticket out = machine.evict(blocks(0, 2));
    machine.engine.release(event);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    machine.driver.finish(0, 7);
    machine.expect_done(in, out);
  }
}

TEST(a_host_block_keeps_its_order) {
  HintMachine machine(kOneLane);
  machine.driver.hold("copy");
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 8));  // in two chunks
  machine.driver.wait_until_held("copy");
  const Ticket in = copy(machine, HintOp::copy_in, blocks(100, 1), kHost + 12 * MiB);
  const Ticket beside = copy(machine, HintOp::copy_in, blocks(200, 1), kHost + 16 * MiB);
  machine.driver.wait_until_held("copy", 2);
  machine.expect_open(in);
  CHECK_EQUAL(machine.driver.calls().back().from, kHost + 16 * MiB);
  machine.driver.let_go("copy");
  machine.expect_done(out, in, beside);
}

// The host block may be managed memory itself, with hints of its own.
TEST(a_host_block_waits_for_the_running_call) {
  HintMachine machine(kOneLane);
  const Ticket hint = machine.hold(HintOp::prefetch, blocks(0, 1));
  const Ticket out = copy(machine, HintOp::copy_out, blocks(100, 1), at(0));
  machine.expect_open(out);
  CHECK_EQUAL(machine.driver.count("copy"), 0U);
  machine.driver.let_go("prefetch");
  machine.expect_done(hint, out);
}

TEST(a_host_block_can_be_freed) {
  HintMachine machine(kOneLane);
  machine.driver.hold("copy");
  const Ticket running = copy(machine, HintOp::copy_out, blocks(0, 8));
  machine.driver.wait_until_held("copy");
  const Ticket queued = copy(machine, HintOp::copy_in, blocks(0, 8));
  CHECK(!machine.engine.forget({kHost, 1}, kSoonNs));  // it is being written
  machine.expect_open(queued);
  std::thread freeing([&] { CHECK(machine.engine.forget({kHost, 16 * MiB}, kPatienceNs)); });
  machine.expect(queued, Outcome::forgotten);
  machine.driver.let_go("copy");
  freeing.join();
  machine.expect(running, Outcome::forgotten);
  CHECK_EQUAL(names(machine.driver), std::string("copy "));  // nothing was discarded
}

TEST(a_copy_out_without_its_event_leaves_the_contents) {
  HintMachine machine(kOneLane);
  const Ticket out = machine.engine.submit({.op = HintOp::copy_out,
                                            .range = blocks(0, 1),
                                            .event = kNoEvent,
                                            .host_address = kHost});
  const Ticket in = copy(machine, HintOp::copy_in, blocks(0, 1));
  machine.expect(out, Outcome::dropped);
  machine.expect_done(in);
  CHECK(machine.driver.calls().empty());
}

TEST(a_failed_release_fails_no_copy) {
  HintMachine machine(kOneLane);
  machine.driver.fail("discard", 4);
  machine.expect_done(copy(machine, HintOp::copy_out, blocks(0, 1)));
  CHECK_EQUAL(machine.engine.statistics().failures.at(0).call, std::string("discard"));
  machine.expect_done(copy(machine, HintOp::copy_in, blocks(0, 1)));
  CHECK_EQUAL(machine.driver.count("copy"), 2U);
}

TEST(a_freed_range_is_not_freed_again) {
  HintMachine machine(kOneLane);
  machine.driver.hold("copy");
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 8));
  machine.driver.wait_until_held("copy");
  std::thread freeing([&] {
    CHECK(machine.engine.forget(blocks(0, 8), kPatienceNs));
    machine.driver.unmap(blocks(0, 8));
  });
  std::this_thread::sleep_for(std::chrono::nanoseconds(kSoonNs));
  machine.driver.let_go("copy");
  freeing.join();
  machine.expect(out, Outcome::forgotten);
  CHECK_EQUAL(names(machine.driver), std::string("copy "));
}

// Real bytes, out and back, while the hints beside them come and go.
TEST(values_survive) {
  constexpr std::size_t kBytes = 3 * MiB + 12345;
  HintEngine engine({.chunk_bytes = 2 * MiB, .in_flight_bytes = 4 * MiB},
                    std::make_unique<HostHintDriver>(1, 0));
  std::vector<unsigned char> device(kBytes), host(kBytes), expected(kBytes);
  std::iota(expected.begin(), expected.end(), static_cast<unsigned char>(1));
  const Range range{reinterpret_cast<std::uintptr_t>(device.data()), kBytes};
  const auto host_address = reinterpret_cast<std::uintptr_t>(host.data());
  device = expected;
  for (int round = 0; round < 50; ++round) {
    const Ticket out = engine.submit(
        {.op = HintOp::copy_out, .range = range, .host_address = host_address});
    CHECK(engine.wait(out, kPatienceNs) == Outcome::done);
    std::fill(device.begin(), device.end(), static_cast<unsigned char>(0));
    engine.submit({.op = HintOp::prefetch, .range = {range.address, 100}});
    const Ticket in =
        engine.submit({.op = HintOp::copy_in, .range = range, .host_address = host_address});
    engine.submit({.op = HintOp::evict, .range = {range.address + 100, 5000}});
    CHECK(engine.wait(in, kPatienceNs) == Outcome::done);
    CHECK(device == expected);
    std::fill(host.begin(), host.end(), static_cast<unsigned char>(0));
  }
}

}  // namespace
}  // namespace umem
