// What serves a request, from what costs least on: each rung of the ladder is counted by name.
#include <numeric>

#include "steps.hpp"

namespace umem {
namespace {

// Which rung serves a request.
const char* serves(Machine& machine, std::size_t bytes, StreamId stream = kMain,
                   TensorClass tensor_class = TensorClass::activations) {
  const auto before = machine.device.stats().served;
  machine.allocate(bytes, stream, tensor_class);
  const auto after = machine.device.stats().served;
  CHECK_EQUAL(std::accumulate(after.begin(), after.end(), std::int64_t{0}),
              std::accumulate(before.begin(), before.end(), std::int64_t{0}) + 1);
  for (std::size_t i = 0; i < kRungs; ++i)
    if (after[i] != before[i]) return kRungNames[i];
  return "none";
}

void check_serves(const char* rung, Machine& machine, std::size_t bytes, StreamId stream = kMain,
                  TensorClass tensor_class = TensorClass::activations) {
  CHECK_EQUAL(std::string(serves(machine, bytes, stream, tensor_class)), rung);
}

TEST(new_memory_and_the_cache) {
  for (const bool is_mapped : {true, false}) {
    Machine machine = machine_of(0, is_mapped);
    check_serves(is_mapped ? "mapped" : "segment", machine, 24 * MiB);
    machine.free(machine.allocate(30 * MiB));
    check_serves("cached", machine, 30 * MiB);
  }
}

// The first and the third of five blocks that fill the budget are free.
TEST(free_memory_in_two_places) {
  Machine machine = machine_of(120 * MiB);
  std::vector<std::uintptr_t> blocks;
  while (blocks.size() < 5) blocks.push_back(machine.allocate(24 * MiB));
  machine.free(blocks[0], blocks[2]);
  machine.allocate(48 * MiB);
  CHECK_EQUAL(machine.device.stats().served[number_of(Rung::alias)], 1);
  for (const LiveBlock& block : machine.allocator.live_blocks())
    if (block.bytes == 48 * MiB) machine.free(block.address);
  check_serves("ended_alias", machine, 24 * MiB);
  check_serves("cached", machine, 24 * MiB);
  check_serves("spilled", machine, 24 * MiB);
}

TEST(memory_of_another_stream) {
  Machine machine = machine_of(64 * MiB);
  machine.free(machine.allocate(64 * MiB, kSide));
  const std::uintptr_t borrowed = machine.allocate(40 * MiB);
  CHECK_EQUAL(machine.device.stats().served[number_of(Rung::borrowed)], 1);
  machine.free(borrowed);
  check_serves("taken_back", machine, 64 * MiB, kSide);
}

TEST(room_within_the_budget) {
  Machine machine = machine_of(64 * MiB, false);
  machine.free(machine.allocate(40 * MiB, kSide));
  check_serves("room_made", machine, 60 * MiB);
}

// A card that others use too.
TEST(a_full_card) {
  Machine machine = machine_of(200 * MiB);
  mapped(machine).set_capacity(96 * MiB);
  const std::uintptr_t free = machine.allocate(40 * MiB);
  machine.allocate(56 * MiB);
  machine.free(free);
  check_serves("borrowed", machine, 24 * MiB, kSide);
  check_serves("spilled", machine, 40 * MiB);
}

TEST(a_free_block_that_is_pending) {
  Machine machine({.config = {}, .capacity_bytes = 40 * MiB});
  const std::uintptr_t pending = machine.allocate(40 * MiB);
  machine.driver.launch(kSide);
  machine.free_used(pending, kSide);
  check_serves("waited", machine, 40 * MiB);
}

TEST(host_memory_that_was_spilled) {
  Config config = budget_config(32 * MiB);
  setting_of(config, TensorClass::optimizer_state) = {
      .kind = MemoryKind::pinned, .advice = {}};
  Machine machine({.config = config});
  machine.allocate(30 * MiB);
  const std::uintptr_t spilled = machine.allocate(20 * MiB);
  machine.free(spilled);
  check_serves("spilled_before", machine, 12 * MiB, kMain, TensorClass::optimizer_state);
}

// A capture must not wait, and no memory may be taken from elsewhere.
TEST(while_a_pool_is_open_the_host_serves) {
  Machine machine = machine_of(64 * MiB, false);
  machine.free(machine.allocate(40 * MiB, kSide));
  machine.device.begin_pool({0, 1}, [](StreamId stream) { return stream == kMain; });
  check_serves("spilled", machine, 60 * MiB);
  machine.device.end_pool({0, 1});
  check_serves("room_made", machine, 60 * MiB);
}

TEST(a_request_that_fails_is_not_counted) {
  Machine machine({.config = {}, .capacity_bytes = 40 * MiB});
  CHECK_THROWS(OutOfMemory, machine.allocate(50 * MiB));
  check_serves("segment", machine, 40 * MiB);
  machine.device.reset_accumulated_stats();
  for (const std::int64_t count : machine.device.stats().served) CHECK_EQUAL(count, 0);
}

}  // namespace
}  // namespace umem
