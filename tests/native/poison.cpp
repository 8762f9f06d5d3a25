// Poison: what is freed and what is handed out is overwritten, and nothing that anybody may read.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "core/host.hpp"
#include "steps.hpp"

namespace umem {
namespace {

constexpr std::size_t kBudget = 64 * MiB;
constexpr std::array<std::size_t, 2> kSizes = {4096, 12 * MiB};

MachineSettings poisoned(Config config = {}, bool virtual_memory = false) {
  config.poisons = true;
  return {.config = config, .virtual_memory = virtual_memory};
}

bool overlap(const Range& left, const Range& right) {
  return left.address < right.address + right.bytes && right.address < left.address + left.bytes;
}

// The fills of a block so far since the last call, which are all of it and on the stream.
std::size_t fills_of(Machine& machine, std::uintptr_t address, std::size_t bytes, StreamId stream) {
  std::size_t found = 0;
  for (const Fill& fill : machine.driver.take_fills()) {
    if (!overlap(fill.range, {address, bytes})) continue;
    CHECK_EQUAL(fill.range.address, address);
    CHECK(fill.range.bytes >= bytes);
    CHECK_EQUAL(fill.stream.stream, stream);
    ++found;
  }
  return found;
}

TEST(nothing_is_poisoned_by_default) {
  Machine machine;
  machine.free(machine.allocate(4096));
  machine.allocate(4096);
  CHECK_EQUAL(machine.driver.take_fills().size(), 0U);
}

TEST(a_new_block_is_poisoned_on_its_stream) {
  for (const MemoryKind kind : {MemoryKind::managed, MemoryKind::device, MemoryKind::pinned})
    for (const bool virtual_memory : {false, true})
      for (const StreamId stream : {kMain, kSide})
        for (const std::size_t bytes : kSizes) {
          Machine machine(poisoned(config_of(kind), virtual_memory));
          const std::uintptr_t address = machine.allocate(bytes, stream);
          CHECK_EQUAL(fills_of(machine, address, bytes, stream), 1U);
        }
}

TEST(a_block_beyond_the_budget_is_poisoned) {
  Machine machine(poisoned(budget_config(kBudget)));
  machine.allocate(kBudget);
  const std::uintptr_t spilled = machine.allocate(12 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 12 * MiB);
  CHECK_EQUAL(fills_of(machine, spilled, 12 * MiB, kMain), 1U);
}

// Until then, another stream may read it that this one waits for before it asks for memory.
TEST(a_freed_block_is_poisoned_by_its_streams_next_request) {
  for (const std::size_t bytes : kSizes) {
    Machine machine(poisoned());
    machine.free(machine.allocate(kSizes[1], kSide));
    const std::uintptr_t address = machine.allocate(bytes);
    machine.allocate(100);
    machine.driver.take_fills();
    machine.free(address);
    machine.allocate(kSizes[1], kSide);
    machine.allocate(kSizes[1], kSide);  // which the cache has no memory for
    CHECK_EQUAL(fills_of(machine, address, bytes, kMain), 0U);
    CHECK(machine.allocate(bytes / 2) != 0);  // the block's first half, which is poisoned anew
    const std::vector<Fill> fills = machine.driver.take_fills();
    CHECK_EQUAL(fills.size(), 2U);
    CHECK_EQUAL(fills[0].range.address, address);
    CHECK_EQUAL(fills[0].range.bytes, bytes);
    CHECK_EQUAL(fills[0].stream.stream, kMain);
  }
}

TEST(a_freed_block_is_reused_and_merged_as_ever) {
  Machine machine(poisoned());
  const std::uintptr_t left = machine.allocate(4 * MiB), right = machine.allocate(4 * MiB);
  machine.free(left, right);
  CHECK_EQUAL(machine.device.stats().allocation.all.current, 0);
  CHECK_EQUAL(machine.allocate(8 * MiB), left);
}

TEST(a_block_of_other_streams_is_poisoned_when_they_are_over) {
  Machine machine(poisoned());
  const std::uintptr_t address = machine.allocate(4096);
  machine.driver.take_fills();
  machine.driver.launch(kSide);
  machine.free_used(address, kSide);
  machine.allocate(12 * MiB);
  CHECK_EQUAL(fills_of(machine, address, 4096, kMain), 0U);
  machine.driver.finish(kSide);
  machine.allocate(12 * MiB);
  CHECK_EQUAL(fills_of(machine, address, 4096, kMain), 1U);
}

// Memory that one stream has freed serves another one, behind all that may still read it.
TEST(a_borrowed_block_is_poisoned_on_the_borrowers_stream) {
  Machine machine(poisoned(budget_config(kBudget), true));
  const std::uintptr_t address = machine.allocate(kBudget, kSide);
  const std::uint64_t work = machine.driver.launch(kSide);
  machine.free(address);
  machine.driver.take_fills();
  CHECK_EQUAL(machine.allocate(40 * MiB), address);
  CHECK(machine.driver.runs_behind({0, kMain}, {0, kSide}, work));
  CHECK_EQUAL(fills_of(machine, address, 40 * MiB, kMain), 1U);
  machine.free(address);
  machine.allocate(100);
  CHECK_EQUAL(fills_of(machine, address, 40 * MiB, kMain), 1U);
}

TEST(memory_that_goes_back_is_not_touched) {
  Machine machine(poisoned());
  machine.free(machine.allocate(12 * MiB));
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  machine.driver.take_fills();
  machine.allocate(100);
  CHECK_EQUAL(machine.driver.take_fills().size(), 1U);
}

TEST(what_is_freed_in_a_pause_is_not_touched) {
  Machine machine(poisoned(config_of(MemoryKind::device), true));
  const std::uintptr_t address = machine.allocate(12 * MiB);
  machine.device.pause(64 * GiB);
  machine.driver.take_fills();
  machine.free(address);
  machine.device.resume();
  CHECK_EQUAL(machine.driver.take_fills().size(), 0U);
}

// Its blocks are written and read at every replay, freed or not.
TEST(a_graph_gets_no_poison) {
  Machine machine(poisoned());
  const std::uintptr_t before = machine.allocate(4096, kCapture);
  machine.driver.take_fills();
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  machine.driver.begin_capture(kCapture);
  machine.free(before);
  machine.free(machine.allocate(4096, kCapture));
  const std::uintptr_t output = machine.allocate(4096, kCapture);
  machine.driver.end_capture(kCapture);
  machine.device.end_pool(kPool);
  CHECK_EQUAL(machine.driver.take_fills().size(), 0U);
  machine.free(output);
  CHECK_EQUAL(machine.allocate(4096, kCapture), before);
  CHECK_EQUAL(fills_of(machine, output, 4096, kCapture), 0U);
}

// Whatever a program does, a fill meets no live block but the one that is being handed out.
TEST(live_blocks_are_left_alone) {
  Machine machine(poisoned(budget_config(kBudget), true));
  std::mt19937 random(0);
  std::map<std::uintptr_t, std::size_t> live;
  std::size_t fills = 0;
  const auto below = [&](std::size_t end) { return random() % end; };
  const auto check_fills = [&](std::uintptr_t born) {
    for (const Fill& fill : machine.driver.take_fills()) {
      ++fills;
      for (const auto& [address, bytes] : live)
        CHECK(address == born || !overlap(fill.range, {address, bytes}));
    }
  };
  for (int step = 0; step < 4000; ++step) {
    const StreamId stream = std::array{kMain, kSide}[below(2)];
    if (live.empty() || below(2) != 0) {
      const std::size_t bytes = below(2) != 0 ? 1 + below(100000) : 2 * MiB + below(14 * MiB);
      const std::uintptr_t address = machine.allocate(bytes, stream);
      CHECK(live.emplace(address, bytes).second);
      check_fills(address);
      if (below(3) == 0) {
        machine.driver.launch(kSide);
        machine.device.record_stream(address, kSide);
      }
    } else {
      const auto gone = std::next(live.begin(), static_cast<std::ptrdiff_t>(below(live.size())));
      machine.free(gone->first);
      live.erase(gone);
      check_fills(0);
    }
    if (below(20) == 0) machine.driver.finish(kSide);
    if (below(200) == 0) machine.device.empty_cache();
  }
  CHECK(fills > 3000);
}

TEST(threads_share_the_allocator) {
  constexpr int kThreads = 4;
  Machine machine(poisoned(budget_config(kBudget), true));
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number)
    threads.emplace_back([&machine, number] {
      const StreamId stream = 10 + static_cast<StreamId>(number % 2);
      for (std::size_t step = 0; step < 300; ++step) {
        const std::size_t bytes = step % 5 == 0 ? 2 * MiB : 512 * (1 + step % 40);
        const std::uintptr_t first = machine.allocate(bytes, stream);
        const std::uintptr_t second = machine.allocate(bytes, stream);
        machine.free_used(first, kSide);
        machine.free(second);
        if (step % 50 == 0) machine.device.empty_cache();
      }
    });
  for (std::thread& thread : threads) thread.join();
  machine.device.empty_cache();
  check_consistent(machine.device);
  CHECK_EQUAL(machine.device.stats().active.all.current, 0);
}

TEST(reads_of_freed_and_of_new_memory_give_nan) {
  Config config;
  config.poisons = true;
  Allocator allocator(config, std::make_unique<HostSource>(GiB), std::make_unique<HostDriver>(GiB),
                      1);
  auto* const freed = static_cast<float*>(allocator.allocate(4096, 0, kMain));
  CHECK(freed[0] != freed[0]);
  std::fill_n(freed, 1024, 1.0F);
  CHECK(allocator.device(0).free(reinterpret_cast<std::uintptr_t>(freed)));
  CHECK(freed[1023] == 1.0F);
  allocator.allocate(64, 0, kMain);
  CHECK(freed[1023] != freed[1023]);
}

}  // namespace
}  // namespace umem
