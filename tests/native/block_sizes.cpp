// Sizes of blocks and segments, alignment, and who owns a page.
#include <map>
#include <random>

#include "fake_driver.hpp"

namespace umem {
namespace {

std::size_t block_bytes_for(std::size_t bytes) {
  return round_up(bytes, bytes < 2 * MiB ? 512 : 64 * KiB);
}

TEST(blocks_are_rounded_and_aligned) {
  Machine machine;
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{511}, std::size_t{512}, std::size_t{513}, MiB - 1, MiB, MiB + 1,
        2 * MiB - 1, 2 * MiB, 2 * MiB + 1, 2 * MiB + 64 * KiB, 10 * MiB - 1, 10 * MiB, 33 * MiB + 5,
        5 * GiB}) {
    const std::uintptr_t address = machine.allocate(bytes);
    CHECK_EQUAL(address % (bytes < 2 * MiB ? 512 : 64 * KiB), 0U);
    const std::vector<LiveBlock> live = machine.allocator.live_blocks();
    CHECK_EQUAL(live.size(), 1U);
    CHECK_EQUAL(live[0].address, address);
    CHECK_EQUAL(live[0].requested_bytes, bytes);
    CHECK_EQUAL(live[0].bytes, block_bytes_for(bytes));
    CHECK(machine.source.holds(address, live[0].bytes));
    machine.free(address);
  }
}

std::size_t segment_bytes_for(std::size_t bytes) {
  Machine machine;
  machine.allocate(bytes);
  const std::vector<SegmentSnapshot> segments = machine.device.segments();
  CHECK_EQUAL(segments.size(), 1U);
  CHECK_EQUAL(segments[0].bytes, machine.source.held_bytes());
  return segments[0].bytes;
}

// torch's own sizes, with 8 MiB where blocks of 1 to 2 MiB do not share a segment with larger ones.
TEST(segments_leave_room_for_more) {
  CHECK_EQUAL(segment_bytes_for(1), 2 * MiB);
  CHECK_EQUAL(segment_bytes_for(MiB), 2 * MiB);
  CHECK_EQUAL(segment_bytes_for(MiB + 1), 8 * MiB);
  CHECK_EQUAL(segment_bytes_for(2 * MiB - 1), 8 * MiB);
  CHECK_EQUAL(segment_bytes_for(2 * MiB), 20 * MiB);
  CHECK_EQUAL(segment_bytes_for(8 * MiB), 20 * MiB);
  CHECK_EQUAL(segment_bytes_for(10 * MiB - 64 * KiB), 20 * MiB);
  CHECK_EQUAL(segment_bytes_for(10 * MiB), 10 * MiB);
  CHECK_EQUAL(segment_bytes_for(10 * MiB + 1), 12 * MiB);
  CHECK_EQUAL(segment_bytes_for(100 * MiB), 100 * MiB);
}

TEST(large_blocks_own_their_pages) {
  Machine machine;
  std::mt19937_64 random(1);
  std::vector<std::uintptr_t> addresses;
  for (int step = 0; step < 3000; ++step) {
    if (addresses.size() < 300) {
      const std::size_t bytes = random() % 3 == 0 ? 2 * MiB + random() % (12 * MiB)
                                                  : 1 + random() % (2 * MiB - 1);
      const auto tensor_class = static_cast<TensorClass>(random() % kClasses);
      addresses.push_back(machine.allocate(bytes, 0, tensor_class));
    } else {
      std::swap(addresses[random() % addresses.size()], addresses.back());
      machine.free(addresses.back());
      addresses.pop_back();
    }
  }
  const std::vector<LiveBlock> live = machine.allocator.live_blocks();
  const auto by_page = [&live](std::size_t page_bytes) {
    std::map<std::uintptr_t, std::vector<LiveBlock>> found;
    for (const LiveBlock& block : live)
      for (std::uintptr_t page = block.address / page_bytes;
           page <= (block.address + block.bytes - 1) / page_bytes; ++page)
        found[page].push_back(block);
    return found;
  };
  const auto is_large = [](const LiveBlock& block) { return block.requested_bytes >= 2 * MiB; };
  CHECK(std::any_of(live.begin(), live.end(), is_large));
  for (const auto& [page, blocks] : by_page(64 * KiB))
    for (const LiveBlock& block : blocks) CHECK(!is_large(block) || blocks.size() == 1);
  // Nor do classes of smaller ones share 2 MiB, with each other or with large ones.
  for (const auto& [page, blocks] : by_page(2 * MiB))
    for (const LiveBlock& block : blocks) {
      CHECK_EQUAL(is_large(block), is_large(blocks[0]));
      CHECK(is_large(block) || block.tensor_class == blocks[0].tensor_class);
    }
}

// Neighbours of sizes a little above a multiple of 2 MiB lie close to each other.
TEST(large_blocks_are_packed) {
  Machine machine;
  const std::uintptr_t first = machine.allocate(2 * MiB + 1);
  CHECK_EQUAL(first % (2 * MiB), 0U);
  CHECK_EQUAL(machine.allocate(4 * MiB + 64 * KiB), first + 2 * MiB + 64 * KiB);
  CHECK_EQUAL(machine.allocate(2 * MiB), first + 6 * MiB + 128 * KiB);
  CHECK_EQUAL(machine.source.held_bytes(), 20 * MiB);
}

// A large block of one class may take what one of another class left; a small one may not.
TEST(classes_share_large_memory_only) {
  Machine machine;
  const std::uintptr_t gradient = machine.allocate(3 * MiB, 0, TensorClass::gradients);
  machine.free(gradient);
  CHECK_EQUAL(machine.allocate(3 * MiB, 0, TensorClass::activations), gradient);

  const std::uintptr_t small = machine.allocate(1000, 0, TensorClass::gradients);
  machine.free(small);
  CHECK(machine.allocate(1000, 0, TensorClass::activations) != small);
}

// What a policy says of placement is nothing to memory that takes no advice.
TEST(kinds_without_advice_share_large_memory) {
  Config config = config_of(MemoryKind::device);
  setting_of(config, TensorClass::gradients).advice = {
      .placement = Placement::host, .read_mostly = true};
  Machine machine({.config = config});
  const std::uintptr_t gradient = machine.allocate(3 * MiB, 0, TensorClass::gradients);
  machine.free(gradient);
  CHECK_EQUAL(machine.allocate(3 * MiB, 0, TensorClass::activations), gradient);
}

MemoryKind kind_for(Machine& machine, std::size_t bytes) {
  const std::uintptr_t address = machine.allocate(bytes, 0, TensorClass::weights);
  const MemoryKind kind = machine.allocator.live_blocks().at(0).kind;
  machine.free(address);
  return kind;
}

TEST(blocks_below_the_minimum_are_device_memory) {
  for (const std::size_t min_bytes : {64 * KiB, MiB, 16 * MiB}) {
    Config config;
    config.classes[0].min_bytes = min_bytes;
    Machine machine({.config = config});
    CHECK(kind_for(machine, 1) == MemoryKind::device);
    CHECK(kind_for(machine, min_bytes - 1) == MemoryKind::device);
    CHECK(kind_for(machine, min_bytes) == MemoryKind::managed);
    CHECK(kind_for(machine, min_bytes + 32 * MiB) == MemoryKind::managed);
  }
}

TEST(nothing_for_zero_bytes) {
  Machine machine;
  CHECK_EQUAL(machine.allocate(0), 0U);
  CHECK_EQUAL(machine.device.stats().allocation.all.allocated, 0);
  CHECK_EQUAL(machine.source.requests(), 0U);
}

TEST(enormous_sizes_are_out_of_memory) {
  Machine machine;
  const std::size_t negative = static_cast<std::size_t>(-1);
  std::int64_t refused = 0;
  for (const std::size_t bytes : {negative, negative - 511, negative / 2 + 1, negative / 2,
                                  negative / 2 - kPageBytes, std::size_t{1} << 62}) {
    CHECK_THROWS(OutOfMemory, machine.allocate(bytes));
    CHECK_EQUAL(machine.device.stats().num_ooms, ++refused);
  }
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK_EQUAL(machine.allocator.managed_bytes(), 0U);
  machine.allocate(1);
}

TEST(only_the_start_of_a_live_block_can_be_freed) {
  Machine machine({.config = {}, .devices = 2});
  const std::uintptr_t small = machine.allocate(1000);
  const std::uintptr_t large = machine.allocate(5 * MiB);
  CHECK(!machine.device.free(small + 512));
  CHECK(!machine.device.free(small + 1024));  // the cached rest of the segment
  CHECK(!machine.device.free(large + 64 * KiB));
  CHECK(!machine.device.free(0));
  CHECK(!machine.allocator.device(1).free(small));
  for (const std::uintptr_t address : {small, large}) {
    machine.free(address);
    CHECK(!machine.device.free(address));
  }
  CHECK_EQUAL(machine.device.stats().allocation.all.freed, 2);
}

TEST(addresses_find_their_segment) {
  Machine machine({.config = {}, .devices = 2});
  const std::uintptr_t first = machine.allocate(3 * MiB);
  const std::uintptr_t second = machine.allocate(3 * MiB);
  const std::uintptr_t elsewhere = machine.allocate_on(1, 100);
  for (const std::uintptr_t address : {first, first + 1, second, second + 3 * MiB - 1}) {
    const auto base = machine.allocator.base_allocation(address);
    CHECK(base.has_value());
    CHECK_EQUAL(base->address, first);
    CHECK_EQUAL(base->bytes, 20 * MiB);
  }
  CHECK_EQUAL(machine.allocator.base_allocation(elsewhere + 99)->address, elsewhere);
  CHECK(!machine.allocator.base_allocation(first - 1).has_value());
  CHECK(!machine.allocator.base_allocation(first + 20 * MiB).has_value());
  CHECK_THROWS(std::out_of_range, machine.allocator.device(2));
  CHECK_THROWS(std::out_of_range, machine.allocator.device(-1));
}

}  // namespace
}  // namespace umem
