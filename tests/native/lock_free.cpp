// What threads share without a lock, on processors that reorder memory accesses too.
#include <random>
#include <thread>

#include "check.hpp"
#include "core/device_allocator.hpp"
#include "hints/hint_engine.hpp"
#include "hints/host_hint_driver.hpp"

namespace umem {
namespace {

// Whoever reads the outcome of a copy without a lock sees the bytes that a worker copied.
TEST(an_outcome_and_what_was_copied) {
  constexpr std::size_t kWords = 512;
  HintEngine engine({.capacity = 16}, std::make_unique<HostHintDriver>(1, 0.0));
  std::array<std::uint64_t, kWords> host{}, device{};
  for (std::uint64_t round = 1; round <= 2'000; ++round) {
    host.fill(round);
    const Ticket ticket = engine.submit(
        {.op = HintOp::copy_in,
         .range = {reinterpret_cast<std::uintptr_t>(device.data()), sizeof device},
         .host_address = reinterpret_cast<std::uintptr_t>(host.data())});
    CHECK(ticket != 0);
    std::optional<Outcome> outcome;
    while (!(outcome = engine.ended(ticket))) std::this_thread::yield();
    CHECK(*outcome == Outcome::done);
    CHECK(std::all_of(device.begin(), device.end(),
                      [&](std::uint64_t word) { return word == round; }));
  }
}

TEST(a_limit_that_threads_share) {
  constexpr std::size_t kLimit = 1'000;
  SharedLimit limit(kLimit);
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 4; ++seed)
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int i = 0; i < 20'000; ++i) {
        const std::size_t bytes = random() % kLimit;
        if (!limit.take(bytes)) continue;
        CHECK(limit.held_bytes() >= bytes && limit.held_bytes() <= kLimit);
        limit.give_back(bytes);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(limit.held_bytes(), 0U);
  CHECK(limit.take(kLimit) && !limit.take(1));
}

}  // namespace
}  // namespace umem
