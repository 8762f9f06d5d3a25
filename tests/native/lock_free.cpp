// What threads share without a lock, on processors that reorder memory accesses too.
#include <random>
#include <thread>

#include "check.hpp"
#include "core/device_allocator.hpp"

namespace umem {
namespace {

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
