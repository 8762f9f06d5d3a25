// Copies carry values: they keep their order, and a copy that fails loses nothing.
#include <cstring>
#include <numeric>

#include "fake_hint_driver.hpp"
#include "hints/host_hint_driver.hpp"

namespace umem {
namespace {

constexpr HintSettings kOneLane{.chunk_bytes = 8 * MiB,
                                .in_flight_bytes = 64 * MiB,
                                .prefetch_workers = 1};
constexpr std::uintptr_t kHost = std::uintptr_t{1} << 44;

Ticket copy(HintMachine& machine, HintOp op, Range range, std::uintptr_t host = kHost) {
  return machine.engine.submit({.op = op, .range = range, .host_address = host});
}

std::string names(FakeHintDriver& driver) {
  std::string all;
  for (const HintCall& call : driver.calls()) all += call.name + " ";
  return all;
}

void out_copies_all_and_then_frees() {
  HintMachine machine(kOneLane);
  machine.engine.set_resident(0, blocks(0, 10), true);
  machine.expect(copy(machine, HintOp::copy_out, blocks(0, 10)), Outcome::done);
  CHECK_EQUAL(names(machine.driver), std::string("copy copy copy discard "));
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK(calls[1].range == Range(kHost + 8 * MiB, 8 * MiB));
  CHECK_EQUAL(calls[1].from, at(4));
  CHECK(calls[3].range == blocks(0, 10));
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 0U);
}

void in_brings_pages_and_then_copies() {
  HintMachine machine(kOneLane);
  machine.expect(copy(machine, HintOp::copy_in, blocks(0, 5)), Outcome::done);
  CHECK_EQUAL(names(machine.driver), std::string("prefetch copy prefetch copy "));
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK(calls[3].range == blocks(4, 1));
  CHECK_EQUAL(calls[3].from, kHost + 8 * MiB);
  CHECK_EQUAL(machine.engine.statistics().resident_bytes.at(0), 10 * MiB);
}

void copies_keep_their_order() {
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
  machine.expect(out, Outcome::done);
  machine.expect(in, Outcome::done);
  machine.expect(hint, Outcome::done);
  CHECK_EQUAL(names(machine.driver),
              std::string("copy copy discard prefetch copy prefetch copy prefetch "));
}

void copies_replace_hints_and_are_not_replaced() {
  HintMachine machine(kOneLane);
  machine.driver.hold("evict");
  machine.evict(blocks(100, 1));
  machine.driver.wait_until_held("evict");
  const Ticket hint = machine.evict(blocks(0, 1));
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 1));
  machine.expect(hint, Outcome::superseded);
  const Ticket in = machine.prefetch(blocks(0, 1));
  machine.expect_open(in);
  machine.driver.let_go("evict");
  machine.expect(out, Outcome::done);
  machine.expect(in, Outcome::done);
}

// Half of it is on the host only in the copy: the device still has all, and keeps it.
void a_failed_copy_out_leaves_the_contents() {
  HintMachine machine(kOneLane);
  machine.driver.hold("copy");
  const Ticket out = copy(machine, HintOp::copy_out, blocks(0, 12));
  machine.driver.wait_until_held("copy");
  machine.driver.let_one_go("copy");
  machine.driver.fail("copy", 4);
  machine.driver.let_go("copy");
  machine.expect(out, Outcome::failed);
  CHECK_EQUAL(machine.driver.count("discard"), 0U);

  machine.expect(copy(machine, HintOp::copy_in, blocks(0, 12)), Outcome::done);
  CHECK_EQUAL(machine.driver.count("prefetch"), 0U);  // there was nothing to bring back
  machine.expect(copy(machine, HintOp::copy_in, blocks(4, 2)), Outcome::failed);

  const std::size_t copies = machine.driver.count("copy");
  machine.expect(copy(machine, HintOp::copy_out, blocks(0, 12)), Outcome::done);
  machine.expect(copy(machine, HintOp::copy_in, blocks(0, 12)), Outcome::done);
  CHECK_EQUAL(machine.driver.count("copy"), copies + 6);
}

void a_copy_out_without_its_event_leaves_the_contents() {
  HintMachine machine(kOneLane);
  const Ticket out = machine.engine.submit({.op = HintOp::copy_out,
                                            .range = blocks(0, 1),
                                            .event = kNoEvent,
                                            .host_address = kHost});
  const Ticket in = copy(machine, HintOp::copy_in, blocks(0, 1));
  machine.expect(out, Outcome::dropped);
  machine.expect(in, Outcome::done);
  CHECK(machine.driver.calls().empty());
}

void a_failed_release_fails_no_copy() {
  HintMachine machine(kOneLane);
  machine.driver.fail("discard", 4);
  machine.expect(copy(machine, HintOp::copy_out, blocks(0, 1)), Outcome::done);
  CHECK_EQUAL(machine.engine.statistics().failures.at(0).call, std::string("discard"));
  machine.expect(copy(machine, HintOp::copy_in, blocks(0, 1)), Outcome::done);
  CHECK_EQUAL(machine.driver.count("copy"), 2U);
}

void a_freed_range_is_not_freed_again() {
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
void values_survive() {
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

int main() {
  using namespace umem;
  RUN(out_copies_all_and_then_frees);
  RUN(in_brings_pages_and_then_copies);
  RUN(copies_keep_their_order);
  RUN(copies_replace_hints_and_are_not_replaced);
  RUN(a_failed_copy_out_leaves_the_contents);
  RUN(a_copy_out_without_its_event_leaves_the_contents);
  RUN(a_failed_release_fails_no_copy);
  RUN(a_freed_range_is_not_freed_again);
  RUN(values_survive);
}
