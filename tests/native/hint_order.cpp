// Order, chunking and threads of driver calls.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

TEST(requests_run_in_order_of_submission) {
  HintMachine machine(kOneLane);
  const Ticket first = machine.hold(HintOp::prefetch, blocks(0, 1));
  std::vector<Ticket> tickets;
  for (const std::size_t block : {30U, 10U, 20U, 40U})
    tickets.push_back(machine.prefetch(blocks(block, 1)));
  CHECK(tickets.front() == first + 1 && tickets.back() == first + 4);
  machine.driver.let_go("prefetch");
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK_EQUAL(calls.size(), 5U);
  for (std::size_t i = 0; i < 5; ++i)
    CHECK_EQUAL(calls[i].range.address, at(std::array{0U, 30U, 10U, 20U, 40U}[i]));
}

TEST(long_ranges_go_in_chunks_that_end_on_block_boundaries) {
  HintMachine machine(kOneLane);
  // Starts a page before a boundary: 8 MiB chunks would each cut a block in two.
  const Range range{at(1) - kHostPageBytes, 20 * MiB};
  machine.expect_done(machine.prefetch(range));
  std::uintptr_t next = range.address;
  for (const HintCall& call : machine.driver.calls()) {
    CHECK_EQUAL(call.range.address, next);
    CHECK(call.range.bytes <= 8 * MiB);
    next = end_of(call.range);
    CHECK(next % kPageBytes == 0 || next == end_of(range));
  }
  CHECK_EQUAL(next, end_of(range));
  CHECK_EQUAL(machine.driver.calls().size(), 3U);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).calls, 3U);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).moved_bytes, 20 * MiB);
}

TEST(one_request_is_shared_between_workers) {
  HintMachine machine({.chunk_bytes = 8 * MiB, .in_flight_bytes = 64 * MiB});
  machine.driver.hold("prefetch");
  const Ticket ticket = machine.prefetch({at(0), 32 * MiB});
  machine.driver.wait_until_held("prefetch", 2);
  std::vector<HintCall> calls = machine.driver.calls();
  if (calls[0].range.address > calls[1].range.address) std::swap(calls[0], calls[1]);
  CHECK(calls[0].range == Range(at(0), 8 * MiB));
  CHECK(calls[1].range == Range(at(4), 8 * MiB));
  CHECK(calls[0].lane.number != calls[1].lane.number);
  machine.driver.let_go("prefetch");
  machine.expect_done(ticket);
}

TEST(neighbours_go_together) {
  HintMachine machine(kOneLane);
  const Ticket first = machine.hold(HintOp::prefetch, blocks(50, 1));
  std::vector<Ticket> tickets;
  // 11 and 10 follow and precede 12 by address; 14 is apart; 13 fills the last of 8 MiB.
  for (const std::size_t block : {12U, 14U, 11U, 10U, 13U})
    tickets.push_back(machine.prefetch(blocks(block, 1)));
  tickets.push_back(machine.evict(blocks(15, 1)));                              // other direction
  tickets.push_back(machine.ask(HintOp::prefetch, blocks(9, 1), 1));         // other device
  machine.driver.let_go("prefetch");
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  machine.expect_done(first);
  std::vector<Range> prefetches;
  for (const HintCall& call : machine.driver.calls())
    if (call.name == "prefetch" && call.device == 0) prefetches.push_back(call.range);
  CHECK_EQUAL(prefetches.size(), 3U);
  // Upwards first: 12, 13, 14 and then 11 fill the chunk; 10 is left.
  CHECK(prefetches[1] == blocks(11, 4));
  CHECK(prefetches[2] == blocks(10, 1));
  CHECK_EQUAL(machine.counts(HintOp::prefetch).calls, 4U);
  CHECK_EQUAL(machine.requests(HintOp::prefetch, Outcome::done), 7U);
}

TEST(evictions_go_with_those_of_their_class) {
  HintMachine machine(kOneLane);
  const Ticket first = machine.hold(HintOp::evict, blocks(50, 1));
  std::vector<Ticket> tickets{first};
  for (const auto& [block, tensor_class] :
       {std::pair{10U, TensorClass::frozen_weights}, std::pair{11U, TensorClass::frozen_weights},
        std::pair{12U, TensorClass::weights}})
    tickets.push_back(machine.engine.submit(
        {.op = HintOp::evict, .range = blocks(block, 1), .tensor_class = tensor_class}));
  machine.driver.let_go("evict");
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  std::vector<Range> evictions;
  for (const HintCall& call : machine.driver.calls())
    if (call.name == "evict") evictions.push_back(call.range);
  CHECK_EQUAL(evictions.size(), 3U);
  CHECK(evictions[1] == blocks(10, 2));
  CHECK(evictions[2] == blocks(12, 1));
}

TEST(a_neighbour_gives_a_part_of_itself) {
  HintMachine machine(kOneLane);
  machine.hold(HintOp::prefetch, blocks(50, 1));
  const Ticket small = machine.prefetch(blocks(0, 1));
  const Ticket large = machine.prefetch(blocks(1, 8));
  machine.driver.let_go("prefetch");
  machine.expect_done(small, large);
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK_EQUAL(calls.size(), 4U);
  CHECK(calls[1].range == blocks(0, 4));
  CHECK(calls[2].range == blocks(4, 4));
  CHECK(calls[3].range == blocks(8, 1));
}

TEST(each_direction_has_its_workers) {
  HintMachine machine({.chunk_bytes = 2 * MiB, .in_flight_bytes = 64 * MiB});
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 40; ++i) {
    tickets.push_back(machine.prefetch(blocks(10 * i, 1)));
    tickets.push_back(machine.evict(blocks(10 * i + 2, 1)));
    tickets.push_back(machine.ask(HintOp::advise, blocks(10 * i + 6, 1)));
  }
  for (const Ticket ticket : tickets) machine.expect_done(ticket);
  for (const HintCall& call : machine.driver.calls()) {
    CHECK((call.name == "prefetch") == (call.lane.direction == Direction::to_device));
    CHECK_EQUAL(call.lane.direction == Direction::to_host, call.lane.number == 2);
  }
}

// A blocked eviction keeps no prefetch waiting, and the other way round.
TEST(directions_do_not_wait_for_each_other) {
  HintMachine machine;
  const Ticket out = machine.hold(HintOp::evict, blocks(0, 1));
  machine.expect_done(machine.prefetch(blocks(10, 1)));
  machine.expect_open(out);
  machine.driver.hold("prefetch");
  machine.driver.let_go("evict");
  machine.expect_done(out);
  const Ticket in = machine.prefetch(blocks(20, 1));
  machine.driver.wait_until_held("prefetch");
  machine.expect_done(machine.evict(blocks(30, 1)));
  machine.driver.let_go("prefetch");
  machine.expect_done(in);
}

TEST(advice_arrives_whole_and_as_given) {
  HintMachine machine(kOneLane);
  const Advice advice{.placement = Placement::host, .accessed_by_device = true};
  const Ticket ticket = machine.engine.submit(
      {.op = HintOp::advise, .range = {at(0), 1 * GiB}, .advice = advice});
  machine.expect_done(ticket);
  const std::vector<HintCall> calls = machine.driver.calls();
  CHECK_EQUAL(calls.size(), 1U);
  CHECK(calls[0].advice == advice);
  CHECK(calls[0].range == Range(at(0), 1 * GiB));
}

TEST(workers_are_started_ahead_on_demand) {
  HintMachine machine;
  CHECK_EQUAL(machine.driver.count("open"), 0U);
  machine.driver.hold("open");
  machine.engine.start(0);
  machine.driver.wait_until_held("open", 3);
  machine.driver.let_go("open");
  machine.expect_done(machine.prefetch(blocks(0, 1)));
  machine.expect_done(machine.evict(blocks(0, 1)));
  CHECK_EQUAL(machine.driver.count("open"), 3U);
}

TEST(what_cannot_be_meant_is_refused_at_once) {
  HintMachine machine;
  const auto submit = [&](HintRequest request) { return machine.engine.submit(request); };
  CHECK_THROWS(std::invalid_argument, submit({.range = {0, 10}}));
  CHECK_THROWS(std::invalid_argument, submit({.range = {at(0), 0}}));
  CHECK_THROWS(std::invalid_argument, submit({.range = {at(0), SIZE_MAX}}));
  CHECK_THROWS(std::invalid_argument, submit({.range = blocks(0, 1), .device = -1}));
  CHECK_THROWS(std::invalid_argument,
               submit({.op = static_cast<HintOp>(kHintOps), .range = blocks(0, 1)}));
  CHECK_THROWS(std::invalid_argument, HintEngine({.chunk_bytes = 1}, nullptr));
  CHECK_THROWS(std::invalid_argument, HintEngine({.capacity = 0}, nullptr));
  CHECK_THROWS(std::invalid_argument, HintEngine({.prefetch_workers = 0}, nullptr));
}

}  // namespace
}  // namespace umem
