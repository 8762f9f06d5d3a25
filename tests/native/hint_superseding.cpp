// A newer request replaces an older one that it makes pointless, unless that was issued.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr StreamId kStream = 7;

// Keeps a direction's only worker busy with a prefetch or an eviction, so that what follows stays
// queued.
void occupy(HintMachine& machine, HintOp op) {
  const std::string name = op == HintOp::prefetch ? "prefetch" : "evict";
  machine.driver.hold(name);
  machine.ask(op, blocks(1000 + 10 * static_cast<std::size_t>(op), 1));
  machine.driver.wait_until_held(name);
}

TEST(the_opposite_replaces_what_is_queued) {
  HintMachine machine(kOneLane);
  occupy(machine, HintOp::evict);
  const Ticket out = machine.evict(blocks(0, 4));
  const Ticket in = machine.prefetch(blocks(0, 4));
  machine.expect(out, Outcome::superseded);  // though the driver is still held
  machine.expect_done(in);
  machine.driver.let_go("evict");
  const HintCounts counts = machine.counts(HintOp::evict);
  CHECK_EQUAL(counts.wasted_bytes, 8 * MiB);
  CHECK_EQUAL(counts.asked_bytes, 10 * MiB);
}

TEST(only_the_overlap_is_replaced) {
  HintMachine machine(kOneLane);
  occupy(machine, HintOp::evict);
  const Ticket out = machine.evict(blocks(0, 10));
  machine.expect_done(machine.prefetch(blocks(4, 2)));
  machine.driver.let_go("evict");
  machine.expect(out, Outcome::superseded);
  std::vector<Range> ranges;
  for (const HintCall& call : machine.driver.calls())
    if (call.name == "evict") ranges.push_back(call.range);
  CHECK_EQUAL(ranges.size(), 3U);
  CHECK(ranges[1] == blocks(0, 4));
  CHECK(ranges[2] == blocks(6, 4));
  CHECK_EQUAL(machine.counts(HintOp::evict).wasted_bytes, 4 * MiB);
}

TEST(between_two_chunks_there_is_a_check) {
  HintMachine machine(kOneLane);
  machine.driver.hold("evict");
  const Ticket out = machine.evict(blocks(0, 12));  // three chunks
  machine.driver.wait_until_held("evict");
  const Ticket in = machine.prefetch(blocks(0, 12));
  machine.expect_open(in);  // the first chunk is still on its way out
  CHECK_EQUAL(machine.driver.count("prefetch"), 0U);
  machine.driver.let_go("evict");
  machine.expect(out, Outcome::superseded);
  machine.expect_done(in);
  CHECK_EQUAL(machine.driver.count("evict"), 1U);
  CHECK_EQUAL(machine.counts(HintOp::evict).moved_bytes, 8 * MiB);
  CHECK_EQUAL(machine.counts(HintOp::evict).wasted_bytes, 16 * MiB);
}

// A program submits a whole step ahead of the GPU: "in again, much later" must not undo "out, now".
TEST(a_request_replaces_nothing_before_its_event) {
  HintMachine machine(kOneLane);
  occupy(machine, HintOp::evict);
  const Ticket out = machine.evict(blocks(0, 1));
  const Ticket in = machine.ask_behind_work(HintOp::prefetch, blocks(0, 1), kStream);
  machine.expect_open(out);
  machine.driver.let_go("evict");
  machine.expect_done(out);
  machine.expect_open(in);
  machine.driver.finish(0, kStream);
  machine.expect_done(in);
}

TEST(a_request_replaces_one_that_still_waits) {
  HintMachine machine(kOneLane);
  const Ticket out = machine.ask_behind_work(HintOp::evict, blocks(0, 1), kStream);
  machine.expect_open(out);
  machine.expect_done(machine.prefetch(blocks(0, 1)));
  machine.expect(out, Outcome::superseded);
  CHECK_EQUAL(machine.driver.count("evict"), 0U);
  machine.driver.finish(0, kStream);
}

struct Pair {
  HintOp older, newer;
  bool replaced;
};

TEST(which_replaces_which) {
  using enum HintOp;
  for (const auto& [older, newer, replaced] : {
           Pair{prefetch, prefetch, false}, Pair{prefetch, evict, true},
           Pair{prefetch, advise, false},   Pair{evict, prefetch, true},
           Pair{evict, evict, false},       Pair{evict, advise, false},
           Pair{advise, advise, true},      Pair{advise, prefetch, false},
           Pair{advise, evict, false},
       }) {
    HintMachine machine(kOneLane);
    occupy(machine, prefetch);
    occupy(machine, evict);
    const Ticket first = machine.ask(older, blocks(0, 1));
    const Ticket second = machine.ask(newer, blocks(0, 1));
    machine.driver.let_go("prefetch");
    machine.driver.let_go("evict");
    machine.expect(first, replaced ? Outcome::superseded : Outcome::done);
    machine.expect_done(second);
  }
}

TEST(the_newer_device_wins) {
  HintMachine machine(kOneLane);
  occupy(machine, HintOp::prefetch);
  const Ticket to_0 = machine.ask(HintOp::prefetch, blocks(0, 1), 0);
  const Ticket to_1 = machine.ask(HintOp::prefetch, blocks(0, 1), 1);
  machine.expect(to_0, Outcome::superseded);
  machine.driver.let_go("prefetch");
  machine.expect_done(to_1);
}

TEST(back_and_forth_ends_with_the_last) {
  HintMachine machine(kOneLane);
  occupy(machine, HintOp::prefetch);
  occupy(machine, HintOp::evict);
  std::vector<Ticket> tickets;
  for (int i = 0; i < 10; ++i) {
    tickets.push_back(machine.prefetch(blocks(0, 1)));
    tickets.push_back(machine.evict(blocks(0, 1)));
  }
  machine.driver.let_go("prefetch");
  machine.driver.let_go("evict");
  for (const Ticket ticket : tickets)
    machine.expect(ticket, ticket == tickets.back() ? Outcome::done : Outcome::superseded);
  CHECK_EQUAL(machine.driver.calls().size(), 3U);
}

}  // namespace
}  // namespace umem
