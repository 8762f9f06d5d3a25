// Memory of kind `system`: pageable memory that GPU and CPU share, as on a Grace Hopper.
#include <map>

#include "core/host_mapping.hpp"
#include "fake_driver.hpp"
#include "hints/allocations.hpp"

namespace umem {
namespace {

constexpr StreamId kMain = 3, kSide = 7;
constexpr Advice kOnDevice{.placement = Placement::device};

Config system_config() { return config_of(MemoryKind::system, kOnDevice); }

// Of the pages of a range, those that prefer the device, in bytes.
std::size_t on_device(const Machine& machine, Range range) {
  std::map<std::uintptr_t, bool> pages;
  for (const auto& [advised, advice] : machine.driver.advice())
    for (std::size_t offset = 0; offset < advised.bytes; offset += kLargeStepBytes)
      pages[advised.address + offset] = advice.placement == Placement::device;
  std::size_t bytes = 0;
  for (std::size_t offset = 0; offset < range.bytes; offset += kLargeStepBytes)
    bytes += pages.at(range.address + offset) ? kLargeStepBytes : 0;
  return bytes;
}

// free() of the C library waits for nothing, and the GPU's kernels would fault.
TEST(a_segment_is_freed_behind_the_work_of_its_streams) {
  Machine machine({.config = system_config()});
  const std::uintptr_t address = machine.allocate(12 * MiB, kMain);
  machine.driver.launch(kSide);
  machine.free_used(address, kSide);
  const std::uint64_t side_work = machine.driver.launch(kSide);
  const std::uint64_t main_work = machine.driver.launch(kMain);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK_EQUAL(machine.driver.done(kMain), main_work);
  CHECK(machine.driver.done(kSide) < side_work);  // later work, which does not use it
}

TEST(a_stream_that_cannot_be_waited_for_keeps_its_segments) {
  Machine machine({.config = system_config()});
  machine.free(machine.allocate(12 * MiB, kMain));
  machine.driver.begin_capture(kMain);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 12 * MiB);
  machine.driver.end_capture(kMain);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
}

// Pages are taken when they are touched: until then the driver calls all of the card free.
TEST(the_headroom_holds_under_advice) {
  Config config = system_config();
  config.system_headroom_bytes = 16 * MiB;
  Machine machine({.config = config, .device_bytes = 64 * MiB});
  const Range first{machine.allocate(40 * MiB, kMain), 40 * MiB};
  const Range second{machine.allocate(40 * MiB, kMain), 40 * MiB};
  CHECK_EQUAL(on_device(machine, first), 40 * MiB);
  CHECK_EQUAL(on_device(machine, second), 8 * MiB);
  machine.free(second.address);
  CHECK_EQUAL(machine.allocate(40 * MiB, kMain), second.address);
  CHECK_EQUAL(on_device(machine, second), 8 * MiB);
  machine.free(first.address);
  machine.device.empty_cache();
  const Range third{machine.allocate(30 * MiB, kMain), 30 * MiB};
  CHECK_EQUAL(on_device(machine, third), 30 * MiB);
}

// A block that gets another class, and one that gets its own again.
TEST(the_headroom_holds_when_blocks_are_advised_anew) {
  Config config = system_config();
  config.system_headroom_bytes = 60 * MiB;
  setting_of(config, TensorClass::optimizer_state).advice = {
      .placement = Placement::host};
  Machine machine({.config = config, .device_bytes = 64 * MiB});
  const Range block{machine.allocate(20 * MiB, kMain), 20 * MiB};
  CHECK_EQUAL(on_device(machine, block), 4 * MiB);
  machine.device.retag(block.address, TensorClass::optimizer_state);
  CHECK_EQUAL(on_device(machine, block), 0U);
  machine.device.retag(block.address, TensorClass::weights);
  CHECK_EQUAL(on_device(machine, block), 4 * MiB);
}

TEST(host_memory_begins_where_segments_do) {
  for (const std::size_t bytes : {std::size_t{1}, MiB + 1, 20 * MiB}) {
    const Range range = map_host(bytes);
    CHECK_EQUAL(range.address % kPageBytes, 0U);
    CHECK(range.bytes >= bytes && range.bytes < bytes + kLargeStepBytes);
    auto* at = reinterpret_cast<volatile char*>(range.address);
    CHECK_EQUAL(static_cast<int>(at[bytes - 1]), 0);
    at[0] = 1;
    unmap_host({range.address, bytes});
  }
  CHECK_EQUAL(map_host(SIZE_MAX / 4).bytes, 0U);
}

TEST(a_segment_is_allocated_once) {
  Machine machine({.config = system_config()});
  machine.allocate(20 * MiB, kMain);
  CHECK_EQUAL(machine.source.requests(), 1U);
}

// The driver knows its own allocations, and no others.
TEST(a_range_is_walked_by_its_allocations) {
  const std::vector<Range> known = {{4 * MiB, 4 * MiB}, {8 * MiB, 2 * MiB}};
  const auto find = [&](std::uintptr_t address, Range& found) {
    for (const Range& range : known)
      if (overlap({address, 1}, range)) {
        found = range;
        return 0;
      }
    return 1;
  };
  const auto walk = [&](Range range, int fails_at = -1) {
    std::vector<std::size_t> sizes;
    const int error = for_each_allocation(range, find, [&](Range part) {
      sizes.push_back(part.bytes / MiB);
      return static_cast<int>(sizes.size()) - 1 == fails_at ? 7 : 0;
    });
    CHECK_EQUAL(error, fails_at < 0 ? 0 : 7);
    return sizes;
  };
  CHECK((walk({5 * MiB, 4 * MiB}) == std::vector<std::size_t>{3, 1}));
  CHECK((walk({5 * MiB, 4 * MiB}, 0) == std::vector<std::size_t>{3}));
  CHECK((walk({64 * MiB, 9 * MiB}) == std::vector<std::size_t>{9}));
  CHECK(walk({5 * MiB, 0}).empty());
}

}  // namespace
}  // namespace umem
