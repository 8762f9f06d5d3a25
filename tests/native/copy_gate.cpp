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

void closed_while_inside() {
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

void closed_until_the_last_one_leaves() {
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
void opens_at_its_limit() {
  std::uint32_t word = 0;
  CopyGate gate(word, 1ms);
  for (int i = 0; i < 3; ++i) {
    const CopyGate::Closed closed(&gate);
    while (read(word) != 0) std::this_thread::yield();
  }
  CHECK_EQUAL(read(word), 0U);
}

void no_gate() { const CopyGate::Closed closed(nullptr); }

void is_open_behind_its_end() {
  std::uint32_t word = 1;
  { const CopyGate gate(word, 1h); }
  CHECK_EQUAL(read(word), 0U);
}

// Of many threads, none sees the gate open while it is inside.
void many_threads() {
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

int main() {
  using namespace umem;
  RUN(closed_while_inside);
  RUN(closed_until_the_last_one_leaves);
  RUN(opens_at_its_limit);
  RUN(no_gate);
  RUN(is_open_behind_its_end);
  RUN(many_threads);
}
