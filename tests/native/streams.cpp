// Reuse by stream: at once on a block's own stream, on others after their work has completed.
#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr StreamId kMain = 0, kSide = 7, kOther = 8;
constexpr std::array<std::size_t, 2> kSizes = {4096, 12 * MiB};

// Whether a block of the size would come from `address` now.
bool is_reused(Machine& machine, std::uintptr_t address, std::size_t bytes,
               StreamId stream = kMain) {
  const std::uintptr_t next = machine.allocate(bytes, stream);
  machine.free(next);
  return next == address;
}

TEST(same_stream_reuses_at_once) {
  for (const std::size_t bytes : kSizes) {
    Machine machine;
    machine.driver.launch(kMain);  // stream order is enough: the work need not be over
    const std::uintptr_t address = machine.allocate(bytes);
    machine.free(address);
    CHECK(is_reused(machine, address, bytes));
    CHECK_EQUAL(machine.driver.events(), 0U);
    CHECK(!is_reused(machine, address, bytes, kSide));
  }
}

TEST(a_recorded_stream_holds_the_block) {
  for (const std::size_t bytes : kSizes) {
    Machine machine;
    const std::uintptr_t address = machine.allocate(bytes);
    machine.driver.launch(kSide);
    machine.free_used(address, kSide);
    CHECK(!machine.device.free(address));
    CHECK(!machine.device.record_stream(address, kSide));  // no longer a tensor's
    CHECK(!machine.device.retag(address, TensorClass::weights));
    CHECK(!is_reused(machine, address, bytes));

    DeviceStats stats = machine.device.stats();
    CHECK_EQUAL(stats.allocation.all.current, 0);
    CHECK_EQUAL(stats.active.all.current, 1);
    CHECK_EQUAL(stats.active_bytes.all.current, static_cast<std::int64_t>(bytes));
    CHECK_EQUAL(machine.allocator.live_blocks().size(), 0U);
    check_consistent(machine.device);

    machine.driver.finish(kSide);
    CHECK(is_reused(machine, address, bytes));
    CHECK_EQUAL(machine.device.stats().active.all.current, 0);
    CHECK_EQUAL(machine.driver.events(), 0U);
  }
}

TEST(work_after_the_free_does_not_matter) {
  Machine machine;
  const std::uintptr_t address = machine.allocate(4096);
  machine.free_used(address, kSide);
  machine.driver.launch(kSide);
  CHECK(is_reused(machine, address, 4096));
}

TEST(every_recorded_stream_must_finish) {
  for (const bool side_first : {true, false}) {
    Machine machine;
    const std::uintptr_t address = machine.allocate(4096);
    for (const StreamId stream : {kSide, kOther, kSide}) {  // twice is once
      machine.driver.launch(stream);
      machine.device.record_stream(address, stream);
    }
    machine.free(address);
    CHECK_EQUAL(machine.driver.events(), 2U);
    machine.driver.finish(side_first ? kSide : kOther);
    CHECK(!is_reused(machine, address, 4096));
    machine.driver.finish(side_first ? kOther : kSide);
    CHECK(is_reused(machine, address, 4096));
  }
}

TEST(own_stream_needs_no_event) {
  Machine machine;
  const std::uintptr_t address = machine.allocate(4096, kSide);
  machine.driver.launch(kSide);
  machine.free_used(address, kSide);
  CHECK_EQUAL(machine.driver.events(), 0U);
  CHECK(is_reused(machine, address, 4096, kSide));
}

TEST(blocks_of_one_stream_come_back_in_its_order) {
  Machine machine;
  const std::uintptr_t first = machine.allocate(12 * MiB), second = machine.allocate(14 * MiB);
  for (const std::uintptr_t address : {first, second}) {
    machine.driver.launch(kSide);
    machine.device.record_stream(address, kSide);
  }
  machine.free(first);
  machine.driver.finish(kSide);
  machine.driver.launch(kSide);
  machine.free(second);
  CHECK(is_reused(machine, first, 12 * MiB));
  CHECK(!is_reused(machine, second, 14 * MiB));
  machine.driver.finish(kSide);
  CHECK(is_reused(machine, second, 14 * MiB));
}

// A neighbour in use elsewhere is no part of a merged block.
TEST(pending_neighbours_are_left_alone) {
  Machine machine;
  const std::uintptr_t left = machine.allocate(4 * MiB), middle = machine.allocate(4 * MiB),
                       right = machine.allocate(4 * MiB);
  machine.driver.launch(kSide);
  machine.device.record_stream(middle, kSide);
  for (const std::uintptr_t address : {left, middle, right}) machine.free(address);
  check_consistent(machine.device);
  machine.allocate(16 * MiB);  // two holes of 4 and 12 MiB cannot serve it
  CHECK_EQUAL(machine.source.held_segments(), 2U);
  machine.driver.finish(kSide);
  CHECK_EQUAL(machine.allocate(20 * MiB), left);
}

TEST(a_new_owner_starts_without_the_old_streams) {
  Machine machine;
  const std::uintptr_t address = machine.allocate(4096);
  machine.free_used(address, kSide);
  CHECK_EQUAL(machine.allocate(4096), address);
  machine.driver.launch(kSide);
  machine.free(address);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

TEST(empty_cache_waits_for_streams) {
  Machine machine;
  const std::uintptr_t address = machine.allocate(12 * MiB);
  machine.driver.launch(kSide);
  machine.free_used(address, kSide);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK_EQUAL(machine.device.stats().num_sync_all_streams, 1);
  CHECK_EQUAL(machine.driver.done(kSide), 1U);
}

// Nobody can say when that work ends.
TEST(without_an_event_the_block_is_never_reused) {
  Machine machine;
  const std::uintptr_t address = machine.allocate(12 * MiB);
  machine.device.record_stream(address, kSide);
  machine.driver.refuse_events(true);
  machine.free(address);
  machine.driver.refuse_events(false);
  machine.driver.finish(kSide);
  CHECK(!is_reused(machine, address, 12 * MiB));
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 12 * MiB);
  CHECK_EQUAL(machine.device.stats().active.all.current, 1);
}

TEST(a_device_records_what_any_device_holds) {
  Machine machine({.config = {}, .devices = 2});
  const std::uintptr_t address = machine.allocate_on(1, 4096);
  CHECK(!machine.device.record_stream(address, kSide));
  CHECK(machine.allocator.record_stream(address, kSide));
  CHECK(!machine.allocator.record_stream(address + 512, kSide));
  CHECK(machine.allocator.device(1).free(address));
  CHECK_EQUAL(machine.driver.events(), 1U);
}

// Every device has a default stream, and torch gives all of them the same number.
TEST(the_default_stream_of_another_device_is_waited_for) {
  Machine machine({.config = {}, .devices = 3});
  const std::uintptr_t address = machine.allocate_on(0, 12 * MiB);
  machine.allocator.allocate(512, 1, kMain);  // the process uses this device, and not the third
  machine.driver.launch(kMain, 1);
  CHECK(machine.allocator.record_stream(address, kMain));
  machine.free(address);
  CHECK_EQUAL(machine.driver.events(), 1U);
  CHECK(!is_reused(machine, address, 12 * MiB));
  machine.driver.finish(kMain, 1);
  CHECK(is_reused(machine, address, 12 * MiB));
}

}  // namespace
}  // namespace umem
