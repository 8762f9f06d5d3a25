// Free memory between tensors that serves large requests: handles mapped a second time.
#include <map>
#include <random>

#include "core/host.hpp"
#include "steps.hpp"

namespace umem {
namespace {

// No physical memory is used at two addresses.
void check_apart(const Machine& machine) {
  check_consistent(machine.device);
  std::map<HandleId, std::uintptr_t> used;
  for (const SegmentSnapshot& segment : machine.device.segments())
    for (const BlockSnapshot& block : segment.blocks) {
      if (!segment.is_expandable || block.state == BlockState::cached) continue;
      const std::uintptr_t first = block.address / kSmallHandle * kSmallHandle;
      for (std::uintptr_t at = first; at < block.address + block.bytes; at += kSmallHandle) {
        const auto [handle, address] = mapped(machine).mapping_at(at);
        CHECK(handle != 0);
        CHECK_EQUAL(used.emplace(handle, address).first->second, address);
      }
    }
}

// Blocks that fill the budget; the first and the third are free.
struct Holes : Machine {
  explicit Holes(std::size_t count = 5, std::size_t bytes = 24 * MiB)
      : Machine({.config = budget_config(count * bytes), .virtual_memory = true}) {
    while (blocks.size() < count) blocks.push_back(allocate(bytes));
    free(blocks[0], blocks[2]);
  }
  std::vector<std::uintptr_t> blocks;
};

TEST(free_memory_serves_at_once) {
  Holes machine;
  machine.driver.launch(kMain);
  const std::size_t created = mapped(machine).created();
  const std::uintptr_t large = machine.allocate(48 * MiB);
  CHECK_EQUAL(mapped(machine).created(), created);
  CHECK_EQUAL(mapped(machine).unmaps(), 0U);
  CHECK_EQUAL(machine.driver.done(kMain), 0U);  // nothing is waited for
  CHECK_EQUAL(mapped(machine).held_bytes(), 120 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 120 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  CHECK(mapped(machine).holds(large, 48 * MiB));
  check_apart(machine);
  machine.allocate(24 * MiB);  // what was free is not any more
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 24 * MiB);
  check_apart(machine);
}

TEST(it_returns_when_smaller_tensors_need_it) {
  Holes machine;
  const std::uintptr_t large = machine.allocate(48 * MiB);
  machine.free(large);
  CHECK_EQUAL(machine.allocate(47 * MiB), large);  // as many handles
  machine.free(large);
  const std::size_t maps = mapped(machine).maps();
  const std::uintptr_t first = machine.allocate(24 * MiB), second = machine.allocate(24 * MiB);
  CHECK_EQUAL(std::min(first, second), machine.blocks[0]);
  CHECK_EQUAL(std::max(first, second), machine.blocks[2]);
  CHECK_EQUAL(mapped(machine).maps(), maps);
  CHECK_EQUAL(mapped(machine).unmaps(), 0U);
  check_apart(machine);
}

TEST(steps_that_repeat_call_nothing) {
  Holes machine;
  const auto step = [&] {
    const std::uintptr_t large = machine.allocate(48 * MiB);
    machine.driver.launch(kMain);
    machine.free(large);
    const std::uintptr_t first = machine.allocate(24 * MiB), second = machine.allocate(20 * MiB);
    machine.driver.launch(kMain);
    machine.free(first, second);
  };
  step();
  const std::size_t maps = mapped(machine).maps();
  for (int i = 0; i < 10; ++i) step();
  CHECK_EQUAL(mapped(machine).maps(), maps);
  CHECK_EQUAL(mapped(machine).unmaps(), 0U);
  CHECK_EQUAL(mapped(machine).held_bytes(), 120 * MiB);
  check_apart(machine);
}

// Few other handles are mapped where an alias was: behind its last use, not behind all work.
TEST(only_the_last_use_is_waited_for) {
  Holes machine(7, 160 * MiB);
  const std::uintptr_t large = machine.allocate(320 * MiB);
  const std::uint64_t used = machine.driver.launch(kMain);
  machine.free(large);
  machine.allocate(8 * MiB);  // ends it: two handles
  machine.free(machine.blocks[4]);
  machine.driver.launch(kMain);
  CHECK_EQUAL(machine.driver.done(kMain), 0U);
  CHECK_EQUAL(machine.allocate(320 * MiB), large);
  CHECK_EQUAL(mapped(machine).unmaps(), 2U);
  CHECK_EQUAL(machine.driver.done(kMain), used);
  check_apart(machine);
}

// Many are rather mapped at new addresses, while work uses the old ones.
TEST(work_is_not_waited_for_if_that_is_slower) {
  for (const bool is_busy : {true, false}) {
    Holes machine(7);
    const std::uintptr_t large = machine.allocate(48 * MiB);
    machine.driver.launch(kMain);
    machine.free(large);
    machine.allocate(24 * MiB);  // ends it
    machine.free(machine.blocks[4]);
    if (!is_busy) machine.driver.finish(kMain);
    const std::uint64_t done = machine.driver.done(kMain);
    CHECK_EQUAL(machine.allocate(48 * MiB) == large, !is_busy);
    CHECK_EQUAL(mapped(machine).unmaps() == 0, is_busy);
    CHECK_EQUAL(machine.driver.done(kMain), done);
    check_apart(machine);
  }
}

TEST(other_streams_have_used_it_before) {
  Holes machine;
  const std::uintptr_t large = machine.allocate(48 * MiB);
  const std::uint64_t work = machine.driver.launch(kSide);
  machine.free_used(large, kSide);
  const std::uintptr_t small = machine.allocate(24 * MiB);
  CHECK(machine.driver.done(kSide) >= work || pinned_stats(machine).spilled_bytes != 0);
  machine.free(small);
  check_apart(machine);
}

// What another stream has used is free only once that is waited for: an alias too, which then ends.
TEST(one_that_is_waited_for_serves_more) {
  Holes machine(7);
  const std::uintptr_t large = machine.allocate(48 * MiB);
  const std::uint64_t work = machine.driver.launch(kSide);
  machine.free_used(large, kSide);
  machine.free(machine.blocks[4]);
  machine.allocate(72 * MiB);
  CHECK_EQUAL(machine.driver.done(kSide), work);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_apart(machine);
}

// The free memory beside which a tensor would grow is none that can move there.
TEST(too_little_can_move_and_more_is_waited_for) {
  Machine machine = machine_of(120 * MiB);
  std::vector<std::uintptr_t> blocks;
  while (blocks.size() < 5) blocks.push_back(machine.allocate(24 * MiB));
  const std::uint64_t work = machine.driver.launch(kSide);
  machine.device.record_stream(blocks[2], kSide);
  machine.free(blocks[2], blocks[4]);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(machine.driver.done(kSide), work);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_apart(machine);
}

TEST(all_of_it_goes_back) {
  Holes machine;
  const std::uintptr_t large = machine.allocate(48 * MiB);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 120 * MiB);
  machine.free(large);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 72 * MiB);
  CHECK(!mapped(machine).is_mapped(large) && !mapped(machine).is_mapped(machine.blocks[0]));
  machine.allocate(48 * MiB);
  machine.device.set_device_budget(72 * MiB);
  check_apart(machine);
}

// New handles fill the hole that an alias left: its own stay where they are.
TEST(a_hole_is_filled_meanwhile) {
  Holes machine;
  const std::uintptr_t large = machine.allocate(48 * MiB);
  machine.device.set_device_budget(168 * MiB);
  const std::uint64_t work = machine.driver.launch(kMain);
  mapped(machine).on_unmap([&] { CHECK(machine.driver.done(kMain) >= work); });
  for (int i = 0; i < 2; ++i) machine.allocate(24 * MiB);
  check_apart(machine);
  machine.free(large);
  machine.allocate(20 * MiB);
  machine.allocate(20 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  CHECK_EQUAL(mapped(machine).held_bytes(), 168 * MiB);
  check_apart(machine);
}

TEST(a_pause_ends_it) {
  for (const bool is_live : {true, false}) {
    Holes machine;
    const std::uintptr_t large = machine.allocate(48 * MiB);
    if (!is_live) machine.free(large);
    machine.device.pause(kHost);
    CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
    machine.device.resume();
    CHECK_EQUAL(mapped(machine).is_mapped(large), is_live);
    check_apart(machine);
    if (is_live) machine.free(large);
    for (const std::size_t mib : {48, 24, 24, 48}) machine.free(machine.allocate(mib * MiB));
    check_apart(machine);
  }
}

TEST(a_mapping_that_fails_changes_nothing) {
  Holes machine;
  mapped(machine).refuse_maps(true);
  machine.allocate(48 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 48 * MiB);
  check_apart(machine);
  mapped(machine).refuse_maps(false);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 72 * MiB);
}

// A stream without events is not waited for, and an alias of it is mapped once only.
TEST(without_events_nothing_is_mapped_over) {
  Holes machine;
  const std::uintptr_t large = machine.allocate(48 * MiB);
  machine.driver.refuse_events(true);
  machine.free(large);
  machine.free(machine.allocate(24 * MiB));
  CHECK(machine.allocate(48 * MiB) != large);
  CHECK_EQUAL(mapped(machine).unmaps(), 0U);
  check_apart(machine);
}

// A GPU that comes later may access what is used at a second address later still.
TEST(peers_have_access) {
  Machine machine({.config = budget_config(120 * MiB), .devices = 2, .virtual_memory = true});
  machine.allocator.allocate(512, 0, kMain);
  std::vector<std::uintptr_t> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(machine.allocate(23 * MiB));
  machine.free(blocks[0], blocks[2]);
  machine.free(machine.allocate(44 * MiB));
  machine.allocator.allocate(20 * MiB, 1, kMain);
  CHECK(mapped(machine).holds(machine.allocate(44 * MiB), 44 * MiB, {1}));
  check_apart(machine);
}

// Tensors of changing sizes that live and die in any order, within a budget that they all but fill.
TEST(random_tensors_never_share_memory) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    Machine machine = machine_of(1 * GiB);
    std::vector<std::pair<std::uintptr_t, std::size_t>> live;
    std::size_t live_bytes = 0;
    for (int i = 0; i < 1500; ++i) {
      const std::size_t bytes = 2 * MiB + random() % (std::size_t{4 * MiB} << random() % 7);
      while (live_bytes + bytes > 1 * GiB - 40 * MiB) {
        std::swap(live[random() % live.size()], live.back());
        if (random() % 4 == 0) machine.device.record_stream(live.back().first, kSide);
        machine.free(live.back().first);
        live_bytes -= live.back().second;
        live.pop_back();
      }
      if (random() % 3 == 0) machine.driver.launch(random() % 2 == 0 ? kMain : kSide);
      if (random() % 5 == 0) machine.driver.finish(kSide);
      live.emplace_back(machine.allocate(bytes, random() % 8 == 0 ? kSide : kMain), bytes);
      live_bytes += bytes;
      CHECK(mapped(machine).held_bytes() <= 1 * GiB);
      if (i % 20 == 0) check_apart(machine);
      if (random() % 300 == 0) machine.device.empty_cache();
      if (random() % 400 == 0) {
        machine.device.pause(kHost);
        machine.device.resume();
      }
    }
    check_apart(machine);
    for (const auto& [address, bytes] : live) machine.free(address);
    machine.driver.finish(kSide);
    machine.device.empty_cache();
    CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  }
}

// Each hole between two tensors keeps less than two handles; all else serves, wherever it lies, and
// however many large tensors there were before: their addresses are used again.
TEST(random_tensors_within_the_budget_are_on_the_card) {
  constexpr std::size_t kBudget = 8 * GiB;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    Machine machine({.config = budget_config(kBudget),
                     .device_bytes = 2 * kBudget,
                     .virtual_memory = true});
    std::vector<std::pair<std::uintptr_t, std::size_t>> live;
    std::size_t live_bytes = 0;
    for (int i = 0; i < 800; ++i) {
      const std::size_t bytes = 2 * MiB + random() % (std::size_t{32 * MiB} << random() % 7);
      while (live_bytes + bytes + (live.size() + 1) * 2 * kHandle > kBudget) {
        std::swap(live[random() % live.size()], live.back());
        if (random() % 2 == 0) {
          machine.driver.launch(kSide);
          machine.device.record_stream(live.back().first, kSide);
        }
        machine.free(live.back().first);
        live_bytes -= live.back().second;
        live.pop_back();
      }
      if (random() % 3 == 0) machine.driver.launch(kMain);
      if (random() % 5 == 0) machine.driver.finish(kSide);
      live.emplace_back(machine.allocate(bytes), bytes);
      live_bytes += bytes;
    }
    CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  }
}

// In host memory, where a handle has the same contents at all of its addresses.
TEST(contents_stay) {
  HostSource source(0);
  HostDriver driver(8 * GiB, std::make_unique<HostVirtualMemory>(0));
  SharedLimits limits{.managed = SharedLimit(0), .pinned = SharedLimit(0)};
  DeviceAllocator device(0, budget_config(256 * MiB), source, driver, limits);
  std::mt19937_64 random(1);
  struct Tensor {
    unsigned char* address;
    std::size_t bytes;
    unsigned char value;
  };
  std::vector<Tensor> live;
  std::size_t live_bytes = 0;
  const auto touch = [](const Tensor& tensor, bool writes) {
    for (std::size_t at = 0; at < tensor.bytes; at += 64 * KiB)
      if (writes)
        tensor.address[at] = tensor.value;
      else
        CHECK_EQUAL(tensor.address[at], tensor.value);
  };
  for (int i = 0; i < 3000; ++i) {
    const std::size_t bytes = 2 * MiB + random() % (std::size_t{4 * MiB} << random() % 6);
    while (live_bytes + bytes > 240 * MiB) {
      std::swap(live[random() % live.size()], live.back());
      touch(live.back(), false);
      device.free(reinterpret_cast<std::uintptr_t>(live.back().address));
      live_bytes -= live.back().bytes;
      live.pop_back();
    }
    void* address = device.allocate(bytes, kMain, TensorClass::activations);
    live.push_back({static_cast<unsigned char*>(address), bytes, static_cast<unsigned char>(i)});
    live_bytes += bytes;
    touch(live.back(), true);
  }
  for (const Tensor& tensor : live) touch(tensor, false);
}

}  // namespace
}  // namespace umem
