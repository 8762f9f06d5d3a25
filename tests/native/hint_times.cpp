// Lateness of requests, and the engine's statistics.
#include <sys/resource.h>

#include "fake_hint_driver.hpp"
#include "hints/hint_workers.hpp"
#include "hints/host_hint_driver.hpp"

namespace umem {
namespace {

TEST(late_and_early) {
  HintMachine machine;
  const Ticket early = machine.prefetch(blocks(0, 1));
  machine.expect_done(early);
  machine.engine.mark_needed({early});
  machine.engine.mark_needed({early});  // the first time counts
  HintCounts counts = machine.counts(HintOp::prefetch);
  CHECK_EQUAL(counts.early, 1U);
  CHECK_EQUAL(counts.late, 0U);

  const Ticket late = machine.hold(HintOp::prefetch, blocks(10, 1));
  machine.engine.mark_needed({late});
  std::this_thread::sleep_for(std::chrono::nanoseconds(kSoonNs));
  machine.driver.let_go("prefetch");
  machine.expect_done(late);
  counts = machine.counts(HintOp::prefetch);
  CHECK_EQUAL(counts.early, 1U);
  CHECK_EQUAL(counts.late, 1U);
  CHECK(counts.late_ns >= kSoonNs);
  CHECK(counts.driver_ns >= kSoonNs);
}

TEST(needed_but_never_there) {
  HintMachine machine;
  machine.driver.fail("prefetch", 1);
  const Ticket failed = machine.prefetch(blocks(0, 1));
  machine.expect(failed, Outcome::failed);
  machine.engine.mark_needed({failed});
  const HintCounts counts = machine.counts(HintOp::prefetch);
  CHECK_EQUAL(counts.missed, 1U);
  CHECK_EQUAL(counts.late + counts.early, 0U);
  CHECK_EQUAL(counts.wasted_bytes, 2 * MiB);
}

TEST(each_class_and_operation_is_counted_by_itself) {
  HintMachine machine;
  const Ticket weights = machine.engine.submit(
      {.range = blocks(0, 1), .tensor_class = TensorClass::weights});
  const Ticket state = machine.engine.submit(
      {.op = HintOp::evict, .range = blocks(10, 3), .tensor_class = TensorClass::optimizer_state});
  machine.expect_done(weights, state);
  const HintStatistics stats = machine.engine.statistics();
  std::uint64_t requests = 0;
  for (const auto& of_op : stats.counts)
    for (const HintCounts& counts : of_op)
      for (const std::uint64_t with_outcome : counts.requests) requests += with_outcome;
  CHECK_EQUAL(requests, 2U);
  CHECK_EQUAL(machine.counts(HintOp::prefetch, TensorClass::weights).moved_bytes, 2 * MiB);
  CHECK_EQUAL(machine.counts(HintOp::evict, TensorClass::optimizer_state).moved_bytes, 6 * MiB);
}

TEST(what_is_under_way_is_seen) {
  HintMachine machine({.chunk_bytes = 2 * MiB, .prefetch_workers = 1});
  const Ticket ticket = machine.hold(HintOp::prefetch, blocks(0, 4));
  const HintStatistics stats = machine.engine.statistics();
  CHECK_EQUAL(stats.open_requests, 1U);
  CHECK_EQUAL(stats.queued_bytes, 6 * MiB);
  CHECK_EQUAL(stats.in_flight_bytes[0], 2 * MiB);
  CHECK_EQUAL(machine.requests(HintOp::prefetch, Outcome::open), 1U);
  machine.driver.let_go("prefetch");
  machine.expect_done(ticket);
}

TEST(old_records_give_way) {
  HintMachine machine({.capacity = 10});
  const Ticket first = machine.prefetch(blocks(0, 1));
  machine.expect_done(first);
  for (int i = 0; i < 9; ++i) machine.expect_done(machine.prefetch(blocks(0, 1)));
  CHECK(machine.engine.wait(first, 0) == Outcome::done);
  machine.expect_done(machine.prefetch(blocks(0, 1)));
  CHECK(!machine.engine.wait(first, kPatienceNs).has_value());
  CHECK(!machine.engine.wait(10'000, kPatienceNs).has_value());
  machine.engine.mark_needed({first});
  machine.engine.mark_needed({0});
  CHECK_EQUAL(machine.counts(HintOp::prefetch).early, 0U);
}

// The outcome that is known without a lock is the one on record, and is gone with it.
TEST(what_has_ended_is_known_without_a_lock) {
  HintMachine machine({.capacity = 10, .prefetch_workers = 1});
  CHECK(!machine.engine.ended(0).has_value());
  CHECK(!machine.engine.ended(1).has_value());
  const Ticket done = machine.hold(HintOp::prefetch, blocks(0, 1));
  const Ticket replaced = machine.prefetch(blocks(10, 1));
  CHECK(!machine.engine.ended(done).has_value());
  machine.expect_done(machine.evict(blocks(10, 1)));
  CHECK(machine.engine.ended(replaced) == Outcome::superseded);
  machine.driver.let_go("prefetch");
  machine.expect_done(done);
  CHECK(machine.engine.ended(done) == Outcome::done);
  machine.driver.fail("record", 1);
  const Ticket dropped = machine.ask_behind(HintOp::prefetch, blocks(0, 1));
  machine.expect(dropped, Outcome::dropped);
  CHECK(machine.engine.ended(dropped) == Outcome::dropped);
  for (Ticket ticket = dropped + 1; ticket <= done + 10; ++ticket)
    CHECK_EQUAL(machine.prefetch(blocks(0, 1)), ticket);
  machine.expect_done(done + 10);
  CHECK(!machine.engine.ended(done).has_value());
  CHECK(machine.engine.shutdown(kPatienceNs));
  CHECK(machine.engine.ended(done + 10) == Outcome::done);
}

// An old request that ends late costs no newer one its record, and has one of its own.
TEST(late_ends_are_on_record_too) {
  HintMachine machine({.capacity = 4, .prefetch_workers = 1});
  const Ticket old = machine.ask_behind_work(HintOp::prefetch, blocks(0, 1));
  Ticket last = 0;
  for (int i = 0; i < 4; ++i) {
    last = machine.evict(blocks(100, 1));
    machine.expect_done(last);
  }
  CHECK_EQUAL(last, old + 4);
  machine.driver.finish(0, 7);
  machine.expect_done(old);
  CHECK(machine.engine.ended(last) == Outcome::done);
  machine.engine.mark_needed({old});
  CHECK_EQUAL(machine.counts(HintOp::prefetch).early, 1U);
}

// However many workers share the link, and however many requests a call serves.
TEST(driver_time_is_the_links) {
  constexpr double kBytesPerSecond = 256.0 * MiB;
  for (const int workers : {1, 2, 4}) {
    HintEngine engine({.chunk_bytes = 8 * MiB, .prefetch_workers = workers},
                      std::make_unique<HostHintDriver>(1, kBytesPerSecond));
    engine.start(0);
    const std::int64_t start_ns = monotonic_ns();
    std::vector<Ticket> tickets;
    for (std::size_t i = 0; i < 16; ++i)
      tickets.push_back(engine.submit({.range = blocks(4 * i, 4)}));
    for (const Ticket ticket : tickets) CHECK(engine.wait(ticket, kPatienceNs) == Outcome::done);
    const double wall_s = static_cast<double>(monotonic_ns() - start_ns) / 1e9;
    const HintCounts counts = engine.statistics().counts[0][static_cast<std::size_t>(
        TensorClass::other)];
    const double driver_s = static_cast<double>(counts.driver_ns) / 1e9;
    std::cout << workers << " workers: " << driver_s << " s in calls, " << wall_s << " s in all"
              << std::endl;
    // The link alone takes this long; the calls never take longer than the wall.
    CHECK(driver_s >= static_cast<double>(counts.moved_bytes) / kBytesPerSecond * 0.99);
    CHECK(driver_s <= wall_s);
  }
}

// A thread that waits for one request is not woken for each look at its event.
TEST(whoever_waits_sleeps) {
  HintMachine machine;
  const Ticket ticket = machine.ask_behind_work(HintOp::prefetch, blocks(0, 1));
  rusage before{}, after{};
  getrusage(RUSAGE_THREAD, &before);
  CHECK(machine.engine.wait(ticket, 10 * kSoonNs) == Outcome::open);
  getrusage(RUSAGE_THREAD, &after);
  CHECK(machine.driver.count("query") > 100);
  CHECK(after.ru_nvcsw - before.ru_nvcsw < 50);
  machine.driver.finish(0, 7);
  machine.expect_done(ticket);
}

// What needs no worker wakes none: the thread that trains pays for each.
TEST(marks_wake_nobody) {
  Inbox inbox;
  std::vector<Message> messages;
  const std::uint64_t rings = inbox.take(messages);
  const auto rung = [&] {
    const std::int64_t before = monotonic_ns();
    inbox.wait(rings, kSoonNs);
    return monotonic_ns() - before < kSoonNs;
  };
  inbox.put({.needed = {1, 2, 3}});
  CHECK_EQUAL(inbox.put({.needed = {4}}), 6U);  // read by a caller in the end
  CHECK(!rung());
  std::size_t unread = 0;
  CHECK_EQUAL(inbox.submit({}, 0, 1, unread), 1U);
  CHECK(rung());
  inbox.take(messages);
  CHECK_EQUAL(messages.size(), 3U);
}

// A caller that marks without end while no worker reads: memory stays bounded.
TEST(messages_that_nobody_reads_are_read_by_the_caller) {
  HintMachine machine({.capacity = 10, .prefetch_workers = 1});
  machine.driver.hold("prefetch");
  machine.driver.hold("evict");
  const Ticket ticket = machine.prefetch(blocks(0, 1));
  machine.evict(blocks(10, 1));
  machine.driver.wait_until_held("prefetch");
  machine.driver.wait_until_held("evict");
  for (int i = 0; i < 1000; ++i) machine.engine.mark_needed({ticket});
  machine.driver.let_go("prefetch");
  machine.driver.let_go("evict");
  machine.expect_done(ticket);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).late, 1U);
}

}  // namespace
}  // namespace umem
