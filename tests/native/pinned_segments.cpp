// Segments of page-locked memory: they grow with their use, and requests lie one after the other.
#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr TensorClass kState = TensorClass::optimizer_state;

std::size_t largest_segment_bytes(const Machine& machine) {
  std::size_t bytes = 0;
  for (const SegmentSnapshot& segment : machine.device.segments())
    bytes = std::max(bytes, segment.bytes);
  return bytes;
}

// A streamed optimizer step copies runs of adjacent blocks with one call: in each segment, requests
// follow each other without a gap.
TEST(requests_lie_in_their_order) {
  Machine machine({.config = config_of(MemoryKind::pinned)});
  std::map<std::uintptr_t, std::uintptr_t> end_of_segment;
  for (std::size_t i = 0; i < 100; ++i) {
    const bool small = i % 3 == 2;
    const std::size_t bytes = small ? (1 + i % 5) * 300 * KiB : (2 + i % 7 * 5) * MiB;
    const std::uintptr_t address = machine.allocate(bytes, 0, kState);
    const std::uintptr_t segment = machine.allocator.base_allocation(address)->address;
    const auto end = end_of_segment.try_emplace(segment, segment).first;
    CHECK_EQUAL(address, end->second);
    end->second = address + round_up(bytes, small ? kMinBlockBytes : kLargeStepBytes);
  }
  CHECK(end_of_segment.size() <= 12);
}

TEST(segments_double_up_to_a_gibibyte) {
  Machine machine({.config = config_of(MemoryKind::pinned)});
  std::size_t used_bytes = 0;
  for (int i = 0; i < 200; ++i) {
    machine.allocate(32 * MiB, 0, kState);
    used_bytes += 32 * MiB;
    CHECK(machine.source.held_bytes() <= std::max(2 * used_bytes, 32 * MiB));
    CHECK(machine.source.held_bytes() <= used_bytes + GiB);
  }
  CHECK_EQUAL(largest_segment_bytes(machine), GiB);
  CHECK(machine.device.stats().num_device_alloc <= 14);
}

// What is cached is no reason to lock more.
TEST(only_memory_in_use_lets_segments_grow) {
  Machine machine({.config = config_of(MemoryKind::pinned)});
  machine.free(machine.allocate(100 * MiB, 0, kState));
  machine.allocate(200 * MiB, 0, kState);
  machine.allocate(50 * MiB, 1, kState);
  CHECK_EQUAL(machine.source.held_bytes(), 350 * MiB);
}

TEST(growth_stops_at_the_limit) {
  Config config = config_of(MemoryKind::pinned);
  config.pinned_limit_bytes = 250 * MiB;
  Machine machine({.config = config});
  machine.allocate(150 * MiB, 0, kState);
  machine.allocate(50 * MiB, 0, kState);
  machine.allocate(50 * MiB, 0, kState);
  CHECK_EQUAL(machine.source.held_bytes(), 250 * MiB);
  CHECK_THROWS(OutOfMemory, machine.allocate(2 * MiB, 0, kState));
}

TEST(device_memory_does_not_grow_ahead) {
  Machine machine({.config = config_of(MemoryKind::device)});
  for (int i = 0; i < 10; ++i) machine.allocate(32 * MiB);
  CHECK_EQUAL(largest_segment_bytes(machine), 32 * MiB);
}

}  // namespace
}  // namespace umem
