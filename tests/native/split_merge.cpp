// Blocks are split from larger ones, and merge again with free neighbours.
#include <numeric>

#include "fake_driver.hpp"

namespace umem {
namespace {

void check_all_orders(std::size_t block_bytes, std::size_t segment_bytes) {
  constexpr std::size_t kBlocks = 5;
  std::array<std::size_t, kBlocks> order{};
  std::iota(order.begin(), order.end(), 0U);
  do {
    Machine machine;
    std::array<std::uintptr_t, kBlocks> addresses{};
    for (std::size_t i = 0; i < kBlocks; ++i) {
      addresses[i] = machine.allocate(block_bytes);
      CHECK_EQUAL(addresses[i], addresses[0] + i * block_bytes);
      check_consistent(machine.device);
    }
    CHECK_EQUAL(machine.source.held_segments(), 1U);
    for (const std::size_t i : order) {
      machine.free(addresses[i]);
      check_consistent(machine.device);
    }
    const std::vector<SegmentSnapshot> segments = machine.device.segments();
    CHECK_EQUAL(segments.size(), 1U);
    CHECK_EQUAL(segments[0].blocks.size(), 1U);
    CHECK_EQUAL(segments[0].blocks[0].bytes, segment_bytes);
    CHECK_EQUAL(machine.device.stats().inactive_split.all.current, 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(every_order_of_frees_joins_small_blocks) { check_all_orders(1024, 2 * MiB); }
TEST(every_order_of_frees_joins_large_blocks) { check_all_orders(4 * MiB, 20 * MiB); }
TEST(every_order_of_frees_joins_packed_blocks) {
  check_all_orders(2 * MiB + 64 * KiB, 20 * MiB);
}

TEST(the_best_hole_is_taken) {
  Machine machine;
  std::array<std::uintptr_t, 5> addresses{};  // with holes of 8, 4 and 2 MiB to come
  const std::array<std::size_t, 5> sizes = {8 * MiB, 2 * MiB, 4 * MiB, 2 * MiB, 2 * MiB};
  for (std::size_t i = 0; i < sizes.size(); ++i) addresses[i] = machine.allocate(sizes[i]);
  for (const std::size_t i : {0U, 2U, 4U}) machine.free(addresses[i]);

  // Behind the last block the segment had 2 MiB left, so its hole is as large as the middle one.
  CHECK_EQUAL(machine.allocate(6 * MiB - 1), addresses[0]);
  CHECK_EQUAL(machine.allocate(2 * MiB), addresses[0] + 6 * MiB);  // exactly what the cut left
  const std::uintptr_t middle_or_last = machine.allocate(4 * MiB);
  CHECK(middle_or_last == addresses[2] || middle_or_last == addresses[4]);
  CHECK_EQUAL(machine.source.held_segments(), 1U);
}

// Less than 2 MiB serves no large request, until the block beside it is free too.
TEST(a_sliver_merges_back) {
  Machine machine;
  std::array<std::uintptr_t, 4> addresses{};
  for (std::uintptr_t& address : addresses) address = machine.allocate(4 * MiB + 640 * KiB);
  const auto sliver = machine.device.segments().at(0).blocks.back();
  CHECK_EQUAL(sliver.bytes, MiB + 512 * KiB);
  const std::uintptr_t elsewhere = machine.allocate(2 * MiB);
  CHECK_EQUAL(machine.source.held_segments(), 2U);
  machine.free(elsewhere);

  machine.free(addresses[3]);
  check_consistent(machine.device);
  CHECK_EQUAL(machine.allocate(6 * MiB), addresses[3]);
  check_consistent(machine.device);
  CHECK_EQUAL(machine.source.held_segments(), 2U);
}

// A block that is a little smaller than its hole leaves a sliver, which goes with the block.
TEST(a_hole_is_whole_again) {
  Machine machine;
  const std::uintptr_t hole = machine.allocate(5 * MiB);
  machine.allocate(5 * MiB);
  machine.free(hole);
  CHECK_EQUAL(machine.allocate(5 * MiB - 64 * KiB), hole);
  check_consistent(machine.device);
  machine.free(hole);
  CHECK_EQUAL(machine.allocate(5 * MiB), hole);
}

TEST(segments_never_merge) {
  Machine machine;
  const std::uintptr_t first = machine.allocate(12 * MiB);
  const std::uintptr_t second = machine.allocate(12 * MiB);
  machine.free(first, second);
  CHECK_EQUAL(machine.device.segments().size(), 2U);
  machine.allocate(24 * MiB);
  CHECK_EQUAL(machine.source.held_segments(), 3U);
}

TEST(only_whole_segments_go_back) {
  Machine machine;
  const std::uintptr_t kept = machine.allocate(3 * MiB);
  machine.free(machine.allocate(3 * MiB));
  machine.free(machine.allocate(64 * MiB));
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 20 * MiB);
  CHECK_EQUAL(machine.device.stats().num_device_free, 1);
  machine.free(kept);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
}

}  // namespace
}  // namespace umem
