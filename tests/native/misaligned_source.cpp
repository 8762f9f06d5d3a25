// A source may return any address on a 256-byte boundary; blocks are still aligned.
#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr std::size_t kOffsetBytes = 256;

TEST(blocks_are_aligned) {
  Machine machine({.config = {}, .offset_bytes = kOffsetBytes});
  for (const std::size_t bytes : {std::size_t{1}, MiB + 1, 2 * MiB, 3 * MiB + 1, 30 * MiB}) {
    const std::uintptr_t address = machine.allocate(bytes);
    const std::size_t alignment = bytes < kPageBytes ? kMinBlockBytes : kLargeStepBytes;
    CHECK_EQUAL(address % alignment, 0U);
    CHECK(machine.source.holds(address, round_up(bytes, alignment)));
    const auto base = machine.allocator.base_allocation(address);
    CHECK(machine.source.holds(base->address, base->bytes));
    check_consistent(machine.device);
    machine.free(address);
  }
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 0U);
}

// The cap is on what the source holds, the part before the first page included.
TEST(the_cap_counts_what_alignment_costs) {
  Config config;
  config.managed_limit_bytes = 32 * MiB;
  Machine machine({.config = config, .offset_bytes = kOffsetBytes});
  CHECK_THROWS(OutOfMemory, machine.allocate(32 * MiB));
  CHECK_EQUAL(machine.allocator.managed_bytes(), 0U);
  machine.allocate(30 * MiB);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 32 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(), 32 * MiB);
}

TEST(no_room_to_align_a_whole_segment) {
  Machine machine({.config = {}, .capacity_bytes = 21 * MiB, .offset_bytes = kOffsetBytes});
  machine.allocate(4 * MiB);  // 20 MiB would fit, and 22 do not
  CHECK_EQUAL(machine.source.held_bytes(), 6 * MiB);
}

}  // namespace
}  // namespace umem
