// A forked child has an engine without threads, which refuses requests and never waits.
#include <sys/wait.h>
#include <unistd.h>

#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr unsigned kDeadlockSeconds = 20;

void expect_success(pid_t child) {
  CHECK(child > 0);
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), EXIT_SUCCESS);
}

void use_in_child(std::unique_ptr<HintEngine> engine, Ticket ticket) {
  alarm(kDeadlockSeconds);  // kills the child, and so fails the test
  CHECK_EQUAL(engine->submit({.range = blocks(0, 1)}), 0U);
  engine->start(0);
  engine->mark_needed({ticket});
  HintBatch batch(0, {{.range = blocks(0, 1)}, {.range = blocks(2, 1)}});
  batch.set_address(1, 0);  // skipped, and so not refused
  CHECK_EQUAL(engine->submit_batch(batch, 7).last, 0U);
  CHECK(engine->forget(blocks(0, 1), kPatienceNs));
  CHECK(!engine->wait(ticket, kPatienceNs).has_value());
  CHECK(!engine->ended(ticket).has_value());
  CHECK_EQUAL(engine->statistics().refused, 2U);
  CHECK(engine->shutdown(kPatienceNs));
  engine.reset();
}

TEST(a_child_refuses_everything) {
  auto owner = std::make_unique<FakeHintDriver>();
  FakeHintDriver& driver = *owner;
  auto engine = std::make_unique<HintEngine>(HintSettings{}, std::move(owner));
  driver.hold("evict");
  const Ticket running = engine->submit({.op = HintOp::evict, .range = blocks(0, 1)});
  driver.wait_until_held("evict");
  const pid_t child = fork();
  if (child == 0) {
    use_in_child(std::move(engine), running);
    _exit(EXIT_SUCCESS);
  }
  expect_success(child);
  driver.let_go("evict");
  CHECK(engine->wait(running, kPatienceNs) == Outcome::done);
}

TEST(a_child_may_fork_again) {
  HintMachine machine;
  machine.expect_done(machine.prefetch(blocks(0, 1)));
  const pid_t child = fork();
  if (child == 0) {
    alarm(kDeadlockSeconds);
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(machine.prefetch(blocks(0, 1)) == 0 ? EXIT_SUCCESS : 2);
    expect_success(grandchild);
    _exit(machine.prefetch(blocks(0, 1)) == 0 ? EXIT_SUCCESS : 3);
  }
  expect_success(child);
}

// Forks at any moment of a busy engine, whose threads are in locks, calls and waits.
TEST(a_busy_engine_can_be_forked) {
  auto owner = std::make_unique<FakeHintDriver>();
  auto engine =
      std::make_unique<HintEngine>(HintSettings{.chunk_bytes = 2 * MiB}, std::move(owner));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < 2; ++number)
    threads.emplace_back([&, number] {
      for (std::size_t i = 0; !stop; ++i) {
        engine->submit({.op = i % 2 ? HintOp::evict : HintOp::prefetch,
                        .range = blocks(100 * number + i % 50, 4)});
        if (i % 16 == 0) engine->forget(blocks(100 * number, 25), kPatienceNs);
      }
    });
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const pid_t child = fork();
    if (child == 0) {
      alarm(kDeadlockSeconds);
      if (engine->submit({.range = blocks(0, 1)}) != 0) _exit(2);
      if (engine->statistics().refused != 1 || !engine->shutdown(0)) _exit(3);
      _exit(EXIT_SUCCESS);
    }
    expect_success(child);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const Ticket last = engine->submit({.range = blocks(9000, 1)});
  CHECK(engine->wait(last, kPatienceNs) == Outcome::done);
}

// ThreadSanitizer forbids threads in the child of a process that had some; AddressSanitizer's
// allocator may be locked there for ever, by a worker of the parent.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(a_child_may_make_its_own) {
  HintMachine parent;
  parent.expect(parent.prefetch(blocks(0, 1)), Outcome::done);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kDeadlockSeconds);
    HintMachine own;
    own.expect(own.prefetch(blocks(0, 1)), Outcome::done);
    CHECK(own.engine.shutdown(kPatienceNs));
    _exit(EXIT_SUCCESS);
  }
  expect_success(child);
  parent.expect(parent.evict(blocks(0, 1)), Outcome::done);
}
#endif

}  // namespace
}  // namespace umem
