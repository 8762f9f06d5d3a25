// The gate before copies: closed while a thread is inside, and open again at its limit.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/copy_gate.hpp"

namespace umem {
namespace {

using namespace std::chrono_literals;

std::uint32_t read(std::uint32_t& word) { return std::atomic_ref(word).load(); }

TEST(closed_while_inside) {
  std::uint32_t word = 0;
  CopyGate gate(word, 1h);
  for (int i = 0; i < 3; ++i) {
    {
      const CopyGate::Closed closed(&gate);
      CHECK_EQUAL(read(word), 1U);
    }
    CHECK_EQUAL(read(word), 0U);
  }
}

TEST(closed_until_the_last_one_leaves) {
  std::uint32_t word = 0;
  CopyGate gate(word, 1h);
  {
    const CopyGate::Closed first(&gate);
    {
      const CopyGate::Closed second(&gate);
      CHECK_EQUAL(read(word), 1U);
    }
    CHECK_EQUAL(read(word), 1U);
  }
  CHECK_EQUAL(read(word), 0U);
}

// Each time anew: a thread that was inside for too long does not open it for later ones.
TEST(opens_at_its_limit) {
  std::uint32_t word = 0;
  CopyGate gate(word, 1ms);
  for (int i = 0; i < 3; ++i) {
    const CopyGate::Closed closed(&gate);
    while (read(word) != 0) std::this_thread::yield();
  }
  CHECK_EQUAL(read(word), 0U);
}

TEST(no_gate) { const CopyGate::Closed closed(nullptr); }

TEST(is_open_behind_its_end) {
  std::uint32_t word = 1;
  { const CopyGate gate(word, 1h); }
  CHECK_EQUAL(read(word), 0U);
}

// Of many threads, none sees the gate open while it is inside.
TEST(many_threads) {
  std::uint32_t word = 0;
  {
    CopyGate gate(word, 1h);
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&] {
        for (int round = 0; round < 500; ++round) {
          const CopyGate::Closed closed(&gate);
          CHECK_EQUAL(read(word), 1U);
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQUAL(read(word), 0U);
  }
}

}  // namespace
}  // namespace umem
