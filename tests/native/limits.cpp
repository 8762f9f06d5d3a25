// Every limit: the cap on managed bytes, the device budget, the memory fraction, the source's room.
#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr StreamId kMain = 0, kSide = 7;

KindStats managed_stats(const Machine& machine) { return machine.device.kind_stats()[0]; }

TEST(the_source_is_asked_again_after_the_cache) {
  Machine machine({.config = {}, .capacity_bytes = 40 * MiB});
  machine.free(machine.allocate(30 * MiB, kSide));
  const std::uintptr_t pending = machine.allocate(10 * MiB);
  machine.driver.launch(kSide);
  machine.free_used(pending, kSide);

  machine.allocate(40 * MiB);  // needs both back, and to wait for the stream
  const DeviceStats stats = machine.device.stats();
  CHECK_EQUAL(stats.num_alloc_retries, 1);
  CHECK_EQUAL(stats.num_sync_all_streams, 1);
  CHECK_EQUAL(stats.num_ooms, 0);
  CHECK_EQUAL(machine.source.held_bytes(), 40 * MiB);
}

// What waiting for streams frees may be the block that was wanted.
TEST(waiting_may_serve_without_a_new_segment) {
  Machine machine({.config = {}, .capacity_bytes = 40 * MiB});
  const std::uintptr_t pending = machine.allocate(30 * MiB);
  machine.driver.launch(kSide);
  machine.free_used(pending, kSide);
  CHECK_EQUAL(machine.allocate(30 * MiB), pending);
}

// A rank sees all GPUs of its host and uses one.
TEST(the_cap_goes_by_the_devices_in_use) {
  Config config;
  config.managed_limit_bytes = 10 * MiB;
  config.managed_bytes_of_device = {30 * MiB, 50 * MiB, 70 * MiB};
  Machine machine({.config = config, .devices = 3});
  const auto fits = [&](std::size_t bytes, int device) {
    try {
      machine.allocator.device(device).free(machine.allocate_on(device, bytes));
      return true;
    } catch (const OutOfMemory&) {
      return false;
    }
  };
  CHECK(!fits(42 * MiB, 0));
  CHECK(fits(40 * MiB, 0));
  CHECK(fits(110 * MiB, 2));
  CHECK(!fits(112 * MiB, 0));
  CHECK(fits(110 * MiB, 0));
}

TEST(a_full_source_is_out_of_memory) {
  Machine machine({.config = {}, .capacity_bytes = 40 * MiB});
  const std::uintptr_t held = machine.allocate(30 * MiB);
  const std::string text = out_of_memory_text(machine, 12 * MiB);
  CHECK(text.starts_with("CUDA out of memory."));
  CHECK(contains(text, "12.00 MiB for activations on GPU 0"));
  CHECK(contains(text, "umem holds 30.00 MiB"));
  CHECK_EQUAL(machine.device.stats().num_ooms, 1);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 30 * MiB);
  machine.free(held);
  machine.allocate(12 * MiB);
}

// Where a whole segment finds no room, what was asked for still may.
TEST(the_last_bytes_can_be_had) {
  Machine machine({.config = {}, .capacity_bytes = 24 * MiB});
  machine.allocate(14 * MiB);
  machine.allocate(4 * MiB);
  machine.allocate(6 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(), 24 * MiB);
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 0);
}

// An executor that keeps the budget itself lifts the allocator's.
TEST(the_budget_changes_at_run_time) {
  Config config;
  config.device_budget_bytes = 20 * MiB;
  Machine machine({.config = config});
  const std::uintptr_t first = machine.allocate(20 * MiB);
  const std::uintptr_t second = machine.allocate(20 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 20 * MiB);
  machine.device.set_device_budget(0);
  const std::uintptr_t third = machine.allocate(30 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 20 * MiB);
  machine.device.set_device_budget(60 * MiB);
  machine.allocate(12 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 32 * MiB);
  for (const std::uintptr_t address : {first, second, third}) machine.free(address);
  machine.device.set_device_budget(1 * MiB);
  machine.device.empty_cache();
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 12 * MiB);
}

TEST(a_failing_source_leaves_nothing_booked) {
  Machine machine;
  machine.source.set_throws(true);
  CHECK_THROWS(std::runtime_error, machine.allocate(12 * MiB));
  CHECK_EQUAL(machine.allocator.managed_bytes(), 0U);
  machine.source.set_throws(false);
  machine.allocate(12 * MiB);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 12 * MiB);
}

TEST(the_managed_cap_counts_all_devices) {
  Config config;
  config.managed_limit_bytes = 64 * MiB;
  Machine machine({.config = config, .devices = 2});
  DeviceAllocator& second = machine.allocator.device(1);
  machine.allocate(30 * MiB);
  second.allocate(30 * MiB, kMain, TensorClass::weights);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 60 * MiB);

  const std::string text = out_of_memory_text(machine, 6 * MiB);
  CHECK(text.starts_with("CUDA out of memory."));
  CHECK(contains(text, "UMEM_MANAGED_LIMIT"));
  CHECK(contains(text, "64.00 MiB, holds 60.00 MiB"));
  CHECK_THROWS(OutOfMemory, second.allocate(6 * MiB, kMain, TensorClass::weights));
  machine.allocate(4 * MiB);  // to the last byte
  CHECK_EQUAL(machine.allocator.managed_bytes(), 64 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::managed), 64 * MiB);
}

TEST(the_managed_cap_takes_other_devices_caches_back) {
  Config config;
  config.managed_limit_bytes = 64 * MiB;
  Machine machine({.config = config, .devices = 2});
  CHECK(machine.allocator.device(1).free(machine.allocate_on(1, 60 * MiB)));
  CHECK(machine.allocator.allocate(60 * MiB, 0, kMain) != nullptr);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 60 * MiB);
}

TEST(the_managed_cap_takes_the_cache_back) {
  Config config;
  config.managed_limit_bytes = 64 * MiB;
  Machine machine({.config = config});
  machine.free(machine.allocate(60 * MiB, kSide));
  machine.allocate(60 * MiB, kMain);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 60 * MiB);
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 1);
}

TEST(the_managed_cap_is_for_managed_memory) {
  Config config = config_of(MemoryKind::pinned);
  config.managed_limit_bytes = 64 * MiB;
  Machine machine({.config = config});
  machine.allocate(100 * MiB);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 0U);
}

Config budget_config(std::size_t budget_bytes, MemoryKind kind = MemoryKind::managed) {
  Config config = config_of(kind);
  config.device_budget_bytes = budget_bytes;
  return config;
}

TEST(over_budget_managed_memory_is_mapped_on_the_host) {
  Machine machine({.config = budget_config(32 * MiB)});
  machine.allocate(30 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 0U);
  const std::uintptr_t spilled = machine.allocate(30 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 30 * MiB);
  CHECK_EQUAL(managed_stats(machine).reserved_bytes, 60 * MiB);
  const AdviceCall last = machine.driver.advice().back();
  CHECK_EQUAL(last.range.address, spilled);
  CHECK(last.advice == (Advice{.placement = Placement::host, .accessed_by_device = true}));
  CHECK_EQUAL(machine.driver.populated().size(), 1U);  // the first one only

  // Its place is the budget's choice: a class does not move it.
  CHECK(machine.device.retag(spilled, TensorClass::weights));
  CHECK_EQUAL(machine.driver.advice().size(), 2U);

  machine.free(spilled);
  CHECK_EQUAL(machine.allocate(30 * MiB), spilled);  // host room is kept for the next step
  machine.free(spilled);
  machine.device.empty_cache();
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 0U);
}

TEST(spilled_blocks_follow_their_class_when_they_are_let) {
  Config config = budget_config(32 * MiB);
  setting_of(config, TensorClass::frozen_weights).advice.read_mostly = true;
  Machine machine({.config = config});
  const std::uintptr_t resident = machine.allocate(32 * MiB);
  const std::uintptr_t spilled = machine.allocate(30 * MiB);
  machine.allocate(64 * KiB);  // spilled too, and no page is its own

  const std::vector<LiveBlock> moved = machine.device.unspill();
  CHECK_EQUAL(moved.size(), 1U);
  CHECK_EQUAL(moved.front().address, spilled);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 2 * MiB);  // the small one's
  CHECK_EQUAL(machine.driver.advice().back().range.address, spilled);
  CHECK(machine.driver.advice().back().advice == Advice{.placement = Placement::device});
  CHECK(machine.device.unspill().empty());

  CHECK(machine.device.retag(spilled, TensorClass::frozen_weights));
  CHECK(machine.driver.advice().back().advice ==
        (Advice{.placement = Placement::device, .read_mostly = true}));

  // The next block in that memory is a spilled one again.
  machine.free(spilled);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 32 * MiB);
  CHECK_EQUAL(machine.allocate(30 * MiB), spilled);
  CHECK(machine.driver.advice().back().advice ==
        (Advice{.placement = Placement::host, .accessed_by_device = true}));
  CHECK_EQUAL(machine.device.unspill().size(), 1U);
  CHECK(machine.device.retag(resident, TensorClass::frozen_weights));
}

TEST(small_blocks_spill_too) {
  Machine machine({.config = budget_config(4 * MiB)});
  machine.allocate(4 * MiB);
  machine.allocate(1000);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 2 * MiB);
}

TEST(small_device_blocks_of_a_managed_class_spill_too) {
  Config config = budget_config(4 * MiB);
  for (ClassSetting& setting : config.classes) setting.min_bytes = MiB;
  Machine machine({.config = config});
  machine.allocate(4 * MiB);
  machine.allocate(1000);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::device), 0U);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 2 * MiB);
}

// The cache counts against the budget, so it goes before a tensor is sent to the host. No stream
// needs to be waited for.
TEST(the_cache_goes_before_the_tensor) {
  Machine machine({.config = budget_config(32 * MiB)});
  machine.free(machine.allocate(30 * MiB, kSide));
  machine.allocate(30 * MiB, kMain);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 0U);
  CHECK_EQUAL(machine.device.stats().num_device_free, 1);
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 0);
}

TEST(segments_shrink_to_the_budget) {
  Machine machine({.config = budget_config(8 * MiB)});
  machine.allocate(4 * MiB);
  machine.allocate(4 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(), 8 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 0U);
}

TEST(a_spill_meets_the_managed_cap) {
  Config config = budget_config(32 * MiB);
  config.managed_limit_bytes = 48 * MiB;
  Machine machine({.config = config});
  machine.allocate(30 * MiB);
  machine.allocate(10 * MiB);
  CHECK(contains(out_of_memory_text(machine, 10 * MiB), "UMEM_MANAGED_LIMIT"));
  CHECK_EQUAL(machine.allocator.managed_bytes(), 40 * MiB);
}

TEST(host_placed_classes_are_outside_the_budget) {
  Config config = budget_config(8 * MiB);
  // Just as the budget would map it, but by the policy's own choice: that is no spill.
  for (ClassSetting& setting : config.classes)
    setting.advice = {.placement = Placement::host, .accessed_by_device = true};
  Machine machine({.config = config});
  const std::uintptr_t address = machine.allocate(30 * MiB);
  CHECK_EQUAL(managed_stats(machine).reserved_bytes, 30 * MiB);
  CHECK_EQUAL(managed_stats(machine).spilled_bytes, 0U);
  machine.free(address);
  machine.device.empty_cache();
  CHECK_EQUAL(managed_stats(machine).reserved_bytes, 0U);
}

TEST(the_fraction_bounds_what_is_reserved) {
  Machine machine({.config = {}, .device_bytes = 100 * MiB});
  CHECK_EQUAL(machine.device.memory_fraction(), 1.0);
  machine.free(machine.allocate(80 * MiB, kSide));
  machine.device.set_memory_fraction(0.5);
  CHECK_EQUAL(machine.device.memory_fraction(), 0.5);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 1);
  CHECK(contains(out_of_memory_text(machine, 12 * MiB), "set_per_process_memory_fraction(0.5"));
  machine.allocate(10 * MiB);
  machine.device.set_memory_fraction(1.0);
  machine.allocate(12 * MiB);
}

// torch runs no post hook when an optimizer step raises.
TEST(out_of_memory_ends_an_optimizer_step) {
  Machine machine({.config = {}, .capacity_bytes = 4 * MiB});
  ClassContext& classes = machine.allocator.classes();
  classes.set_phase(TensorClass::optimizer_state);
  CHECK_THROWS(OutOfMemory, machine.allocator.allocate(8 * MiB, 0, kMain));
  CHECK(classes.phase() == TensorClass::activations);
  classes.set_phase(TensorClass::weights);
  CHECK_THROWS(OutOfMemory, machine.allocator.allocate(8 * MiB, 0, kMain));
  CHECK(classes.phase() == TensorClass::weights);
}

}  // namespace
}  // namespace umem
