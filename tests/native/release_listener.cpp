// The hint engine forgets memory before the allocator gives it back.
#include <sys/wait.h>
#include <unistd.h>

#include "core/allocator.hpp"
#include "watched_source.hpp"

namespace umem {
namespace {

struct Both {
  explicit Both(const Config& config = {})
      : source(new WatchedSource(hints.driver)),
        allocator(config, std::unique_ptr<SegmentSource>(source), std::make_unique<HostDriver>(0),
                  1) {
    allocator.set_release_listener(hints.engine.release_listener());
  }
  Range allocate(std::size_t bytes) {
    return {reinterpret_cast<std::uintptr_t>(allocator.allocate(bytes, 0, 0)), bytes};
  }

  HintMachine hints;
  WatchedSource* source;
  Allocator allocator;
};

TEST(queued_hints_are_forgotten) {
  Both both;
  const Range range = both.allocate(32 * MiB);
  const Ticket ticket = both.hints.ask_behind_work(HintOp::prefetch, range, 3);
  both.allocator.device(0).free(range.address);
  both.hints.expect_open(ticket);  // cached, not given back
  both.allocator.empty_cache();
  CHECK_EQUAL(both.source->given_back.load(), 1);
  both.hints.expect(ticket, Outcome::forgotten);
  both.hints.driver.finish(0, 3);
}

// Gives the cache back in a thread, and has seen that it waits.
class Releasing {
 public:
  explicit Releasing(Allocator& allocator)
      : thread_([this, &allocator] {
          allocator.empty_cache();
          returned_ = true;
        }) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kSoonNs));
    CHECK(!returned_);
  }
  void join() { thread_.join(); }

 private:
  std::atomic<bool> returned_{false};
  std::thread thread_;
};

TEST(a_running_call_ends_first) {
  Both both;
  const Range range = both.allocate(32 * MiB);
  both.hints.driver.hold("evict");
  both.hints.evict(range);
  both.hints.driver.wait_until_held("evict");
  both.allocator.device(0).free(range.address);
  Releasing releasing(both.allocator);
  // Other threads' hints and statistics need none of the allocator's locks.
  both.hints.expect(both.hints.prefetch(blocks(0, 1)), Outcome::done);
  both.hints.driver.let_go("evict");
  releasing.join();
  CHECK_EQUAL(both.source->given_back.load(), 1);
}

// Of all that goes: no worker begins with one while another is waited for.
TEST(all_are_forgotten_at_once) {
  Both both;
  std::vector<Range> ranges;
  for (int i = 0; i < 8; ++i) ranges.push_back(both.allocate(32 * MiB));
  std::sort(ranges.begin(), ranges.end(),  // the order in which they go
            [](Range a, Range b) { return a.address < b.address; });
  both.hints.driver.hold("evict");
  std::vector<Ticket> tickets;
  for (const Range range : ranges)  // apart, so that no chunk has two
    tickets.push_back(both.hints.evict({range.address, range.bytes - kPageBytes}));
  both.hints.driver.wait_until_held("evict");
  for (const Range range : ranges) both.allocator.device(0).free(range.address);
  std::thread releasing([&] { both.allocator.empty_cache(); });
  for (std::size_t i = 1; i < tickets.size(); ++i)  // long before the release's patience ends
    CHECK(both.hints.engine.wait(tickets[i], kPatienceNs / 4) == Outcome::forgotten);
  both.hints.driver.let_go("evict");
  releasing.join();
  both.hints.expect(tickets[0], Outcome::done);
  CHECK_EQUAL(both.hints.driver.count("evict"), 1U);
  CHECK_EQUAL(both.source->given_back.load(), 8);
}

TEST(every_way_back_is_heard) {
  HintMachine hints;
  Ticket freed = 0, live = 0;
  {
    Allocator allocator(Config{}, std::make_unique<WatchedSource>(hints.driver),
                        std::make_unique<HostDriver>(0), 1);
    allocator.set_release_listener(hints.engine.release_listener());
    const auto allocate = [&] {
      return Range{reinterpret_cast<std::uintptr_t>(allocator.allocate(4 * MiB, 0, 0)), 4 * MiB};
    };
    const Range range = allocate();
    freed = hints.ask_behind_work(HintOp::prefetch, range);
    allocator.device(0).free(range.address);
    allocator.empty_cache();
    hints.expect(freed, Outcome::forgotten);
    live = hints.ask_behind_work(HintOp::prefetch, allocate());
    hints.expect_open(live);
  }
  hints.expect(live, Outcome::forgotten);
}

TEST(without_a_listener_nothing_is_forgotten) {
  Both both;
  const Range range = both.allocate(32 * MiB);
  both.allocator.set_release_listener(nullptr);
  const Ticket ticket = both.hints.ask_behind_work(HintOp::prefetch, range, 3);
  both.allocator.device(0).free(range.address);
  both.allocator.empty_cache();
  both.hints.expect_open(ticket);
  CHECK(both.hints.engine.forget(range, kPatienceNs));
  both.hints.driver.finish(0, 3);
}

TEST(the_engine_may_go_first) {
  auto owner = std::make_unique<FakeHintDriver>();
  auto engine = std::make_unique<HintEngine>(HintSettings{}, std::move(owner));
  Allocator allocator({}, std::make_unique<HostSource>(0), std::make_unique<HostDriver>(0), 1);
  allocator.set_release_listener(engine->release_listener());
  void* const address = allocator.allocate(32 * MiB, 0, 0);
  CHECK(engine->submit({.range = {reinterpret_cast<std::uintptr_t>(address), 32 * MiB}}) != 0);
  engine.reset();
  allocator.device(0).free(reinterpret_cast<std::uintptr_t>(address));
  allocator.empty_cache();
}

// The engine's threads and locks are the parent's: a child must not wait for them.
TEST(a_child_gives_back_without_it) {
  Both both;
  const Range range = both.allocate(32 * MiB), other = both.allocate(32 * MiB);
  both.hints.driver.hold("evict");
  const Ticket ticket = both.hints.evict(range);
  both.hints.driver.wait_until_held("evict");
  std::thread asking([&] { both.hints.engine.wait(ticket, kPatienceNs); });  // in the crew's lock
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    if (both.hints.engine.release_listener() != nullptr) _exit(2);
    HintBatch batch(0, {{.range = range}});
    const TicketSpan span = both.hints.engine.submit_batch(batch, 7);
    if (span.last >= span.first) _exit(3);
    both.allocator.device(0).free(other.address);
    both.allocator.empty_cache();
    _exit(both.source->given_back == 1 ? EXIT_SUCCESS : 4);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), EXIT_SUCCESS);
  both.hints.driver.let_go("evict");
  asking.join();
  both.allocator.device(0).free(range.address);
}

}  // namespace
}  // namespace umem
