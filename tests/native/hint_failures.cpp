// Every driver call may fail: failures are counted by name, and the next request is served.
#include "fake_hint_driver.hpp"
#include "hints/host_hint_driver.hpp"

namespace umem {
namespace {

constexpr int kError = 700;

// Behind an event, but for advice.
Ticket ask(HintEngine& engine, HintOp op) {
  if (op == HintOp::advise) return engine.submit({.op = op, .range = blocks(0, 1)});
  HintBatch batch(0, {{.op = op, .range = blocks(0, 1)}});
  return engine.submit_batch(batch, 7).last;
}

std::uint64_t failures(HintMachine& machine, const std::string& call) {
  std::uint64_t count = 0;
  for (const HintFailure& failure : machine.engine.statistics().failures)
    if (failure.call == call) {
      CHECK_EQUAL(failure.error, kError);
      CHECK_EQUAL(failure.text, std::string("fake error 700"));
      count += failure.count;
    }
  return count;
}

TEST(any_call_may_fail_once) {
  for (std::size_t op = 0; op < kHintOps; ++op)
    for (const std::string call :
         {"open", "second_context", "query", "prefetch", "evict", "advise", "synchronize"}) {
      HintMachine machine;
      machine.driver.fail(call, kError);
      const auto operation = static_cast<HintOp>(op);
      const Ticket first = ask(machine.engine, operation);
      CHECK(machine.engine.wait(first, kPatienceNs) != Outcome::open);
      const std::uint64_t failed = failures(machine, call);
      CHECK(failed <= 1);
      // Which calls an operation makes: its own, and these.
      const bool always = call == "open" || call == "synchronize" ||
                          (call == "query" && operation != HintOp::advise);
      CHECK(!always || failed == 1);
      const auto outcome = machine.engine.wait(first, 0);
      CHECK_EQUAL(outcome == Outcome::done, failed == 0 || call == "second_context");
      CHECK_EQUAL(outcome == Outcome::dropped, call == "query" && failed == 1);

      machine.driver.fail(call, kError, 0);  // no more
      machine.expect_done(ask(machine.engine, operation));
    }
}

TEST(every_call_may_fail_always) {
  HintMachine machine;
  for (const std::string call : {"prefetch", "evict", "advise"})
    machine.driver.fail(call, kError, 1'000'000);
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < 300; ++i)
    tickets.push_back(machine.ask(static_cast<HintOp>(i % kHintOps), blocks(10 * i, 1)));
  for (const Ticket ticket : tickets) machine.expect(ticket, Outcome::failed);
  const HintStatistics stats = machine.engine.statistics();
  std::uint64_t counted = 0, failed = 0;
  for (const HintFailure& failure : stats.failures) counted += failure.count;
  for (const auto& of_op : stats.counts)
    for (const HintCounts& counts : of_op) {
      failed += counts.requests[number_of(Outcome::failed)];
      CHECK_EQUAL(counts.wasted_bytes, counts.asked_bytes);
    }
  CHECK_EQUAL(failed, 300U);
  CHECK_EQUAL(counted, 300U);
  CHECK_EQUAL(stats.open_requests, 0U);
  for (const std::size_t bytes : stats.in_flight_bytes) CHECK_EQUAL(bytes, 0U);
}

// Such as under MPS, or on a full card. It is asked for once: making a context takes long.
TEST(without_a_second_context_evictions_go_on) {
  HintMachine machine;
  machine.driver.fail("second_context", kError, 1'000'000);
  for (std::size_t i = 0; i < 5; ++i) machine.expect_done(machine.evict(blocks(10 * i, 1)));
  CHECK_EQUAL(machine.driver.count("second_context"), 1U);
  CHECK_EQUAL(failures(machine, "second_context"), 1U);
}

// What the user switches off is as if the driver refused it, and no call is made.
TEST(what_is_switched_off_is_not_called) {
  HintMachine machine({.without = {.second_context = true, .prefetch = true, .advice = true}});
  for (std::size_t op = 0; op < kHintOps; ++op)
    machine.expect(machine.ask(static_cast<HintOp>(op), blocks(0, 1)), Outcome::failed);
  for (const std::string name : {"second_context", "prefetch", "evict", "advise"})
    CHECK_EQUAL(machine.driver.count(name), 0U);
  CHECK_EQUAL(machine.engine.statistics().failures.size(), 4U);
}

TEST(one_failed_chunk_spares_the_others) {
  HintMachine machine({.chunk_bytes = 2 * MiB, .in_flight_bytes = 64 * MiB, .prefetch_workers = 1});
  machine.driver.fail("prefetch", kError);
  machine.expect(machine.prefetch(blocks(0, 4)), Outcome::failed);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).moved_bytes, 6 * MiB);
  CHECK_EQUAL(machine.counts(HintOp::prefetch).wasted_bytes, 2 * MiB);
}

// After a call that failed, what it may have begun is waited for all the same.
TEST(a_failed_call_is_still_waited_for) {
  HintMachine machine;
  machine.driver.fail("prefetch", kError);
  machine.driver.hold("synchronize");
  machine.prefetch(blocks(0, 1));
  machine.driver.wait_until_held("synchronize");
  CHECK(!machine.engine.forget(blocks(0, 1), kSoonNs));
  machine.driver.let_go("synchronize");
  CHECK(machine.engine.forget(blocks(0, 1), kPatienceNs));
}

// A worker that finds no host memory ends all: nothing stays open, nothing is held.
TEST(a_worker_that_dies_keeps_nobody) {
  HintMachine machine({.prefetch_workers = 1});
  const Ticket running = machine.hold(HintOp::evict, blocks(100, 1));
  const Ticket queued = machine.evict(blocks(200, 1));
  machine.driver.run_out_of_memory();
  machine.driver.fail("prefetch", kError);
  machine.expect(machine.prefetch(blocks(0, 1)), Outcome::failed);
  machine.expect(queued, Outcome::dropped);
  CHECK(machine.engine.forget(blocks(0, 1), kPatienceNs));
  CHECK_EQUAL(machine.engine.statistics().in_flight_bytes[0], 0U);
  CHECK_EQUAL(machine.prefetch(blocks(0, 1)), 0U);
  machine.driver.let_go("evict");
  machine.expect_done(running);
  CHECK(machine.engine.shutdown(kPatienceNs));
  CHECK_EQUAL(machine.engine.statistics().open_requests, 0U);
}

// The host's driver fails where it is asked to, for runs of whole programs: once, and in that call.
TEST(the_host_fails_on_purpose) {
  const auto failures_of = [&](const std::map<std::string, std::int64_t>& fail) {
    HintEngine engine({.prefetch_workers = 1}, std::make_unique<HostHintDriver>(1, 0.0, fail));
    std::vector<std::string> failed;
    for (int round = 0; round < 3; ++round)
      for (std::size_t op = 0; op < kHintOps; ++op)
        CHECK(engine.wait(ask(engine, static_cast<HintOp>(op)), kPatienceNs)
                  .value_or(Outcome::open) != Outcome::open);
    for (const HintFailure& failure : engine.statistics().failures) {
      CHECK_EQUAL(failure.count, 1U);
      failed.push_back(failure.call);
    }
    return failed;
  };
  CHECK(failures_of({}).empty());
  for (const std::string call : {"record", "open", "second_context", "query", "prefetch", "evict",
                                 "advise", "synchronize"}) {
    const bool is_rare = call == "open" || call == "second_context";
    const std::vector<std::string> failed = failures_of({{call, is_rare ? 1 : 2}});
    CHECK_EQUAL(failed.size(), 1U);
    CHECK_EQUAL(failed.front(), call);
  }
  CHECK_EQUAL(failures_of({{"evict", 1}, {"advise", 3}}).size(), 2U);
  CHECK(failures_of({{"evict", 100}}).empty());
  CHECK_THROWS(std::invalid_argument, failures_of({{"map", 1}}));
  CHECK_THROWS(std::invalid_argument, failures_of({{"evict", 0}}));
}

}  // namespace
}  // namespace umem
