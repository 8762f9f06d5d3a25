// Shutdown of the engine: with a full queue, with running calls, twice, never started.
#include "fake_hint_driver.hpp"

namespace umem {
namespace {

TEST(one_that_never_started_ends) {
  HintMachine machine;
  CHECK(machine.engine.shutdown(0));
  CHECK_EQUAL(machine.prefetch(blocks(0, 1)), 0U);
  CHECK_EQUAL(machine.driver.count("close"), 0U);
}

TEST(a_full_queue_refuses_and_is_dropped) {
  HintMachine machine({.capacity = 100, .prefetch_workers = 1});
  const Ticket running = machine.hold(HintOp::prefetch, blocks(0, 1));
  std::vector<Ticket> queued;
  for (std::size_t i = 1; i < 100; ++i) queued.push_back(machine.prefetch(blocks(10 * i, 1)));
  for (const Ticket ticket : queued) CHECK(ticket != 0);
  CHECK_EQUAL(machine.prefetch(blocks(5000, 1)), 0U);
  CHECK_EQUAL(machine.engine.statistics().refused, 1U);
  CHECK_EQUAL(machine.engine.statistics().open_requests, 100U);

  std::thread ending([&] { CHECK(machine.engine.shutdown(kPatienceNs)); });
  machine.expect(queued.back(), Outcome::dropped);  // at once: only the running call is waited for
  machine.driver.let_go("prefetch");
  ending.join();
  machine.expect_done(running);
  for (const Ticket ticket : queued) machine.expect(ticket, Outcome::dropped);
  CHECK_EQUAL(machine.driver.count("prefetch"), 1U);
  CHECK_EQUAL(machine.driver.count("close"), 2U);
  CHECK(machine.engine.shutdown(0));  // once more
  CHECK_EQUAL(machine.prefetch(blocks(0, 1)), 0U);
  CHECK(machine.engine.forget(blocks(0, 1), 0));
  CHECK_EQUAL(machine.engine.statistics().refused, 2U);
}

TEST(there_is_room_again_when_requests_end) {
  HintMachine machine({.capacity = 4});
  for (int i = 0; i < 100; ++i) machine.expect_done(machine.prefetch(blocks(0, 1)));
  CHECK_EQUAL(machine.engine.statistics().refused, 0U);
}

TEST(requests_that_wait_for_events_are_dropped) {
  HintMachine machine;
  const Ticket ticket = machine.ask_behind_work(HintOp::prefetch, blocks(0, 1));
  machine.expect_open(ticket);
  CHECK(machine.engine.shutdown(kPatienceNs));
  machine.expect(ticket, Outcome::dropped);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

// An engine whose shutdown has waited in vain for a call.
struct Stuck {
  Stuck() {
    auto owner = std::make_unique<FakeHintDriver>();
    driver = owner.get();
    engine = std::make_unique<HintEngine>(HintSettings{}, std::move(owner));
    driver->hold("evict");
    driver->hold("close");
    engine->submit({.op = HintOp::evict, .range = blocks(0, 1)});
    driver->wait_until_held("evict");
    CHECK(!engine->shutdown(kSoonNs));
  }

  void let_go() const {
    driver->let_go("evict");
    driver->wait_until_held("close", 3);
    driver->let_go("close");
  }

  FakeHintDriver* driver = nullptr;
  std::unique_ptr<HintEngine> engine;
};

// A call that never returns keeps nobody: its thread goes when it can.
TEST(a_stuck_call_is_left_to_itself) {
  const Stuck stuck;
  stuck.let_go();
  CHECK(stuck.engine->shutdown(kPatienceNs));
}

// Whoever has waited in vain has waited enough: the engine's own end does not wait again.
TEST(a_stuck_call_is_waited_for_once) {
  Stuck stuck;
  const auto before = std::chrono::steady_clock::now();
  stuck.engine.reset();
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(5));  // of 10
  stuck.let_go();
}

TEST(ending_while_others_submit) {
  for (int round = 0; round < 20; ++round) {
    HintMachine machine({.chunk_bytes = 2 * MiB});
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    std::array<std::vector<Ticket>, 3> tickets;
    for (std::size_t number = 0; number < 3; ++number)
      threads.emplace_back([&, number] {
        while (!go) std::this_thread::yield();
        for (std::size_t i = 0; i < 300; ++i)
          if (const Ticket ticket = machine.prefetch(blocks(1000 * number + i, 2)))
            tickets[number].push_back(ticket);
      });
    threads.emplace_back([&] {
      while (!go) std::this_thread::yield();
      CHECK(machine.engine.shutdown(kPatienceNs));
    });
    go = true;
    CHECK(machine.engine.shutdown(kPatienceNs));
    for (std::thread& thread : threads) thread.join();
    for (const auto& of_thread : tickets)  // whoever got a ticket gets an answer
      for (const Ticket ticket : of_thread)
        CHECK(machine.engine.wait(ticket, kPatienceNs) != Outcome::open);
    CHECK_EQUAL(machine.engine.statistics().open_requests, 0U);
  }
}

}  // namespace
}  // namespace umem
