// Private pools: memory of a captured graph stays reserved for as long as the graph lives.
#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr PoolId kPool{0, 1}, kSecondPool{0, 2};
constexpr StreamId kMain = 0, kCapture = 5, kSide = 7;

bool on_capture_stream(StreamId stream) { return stream == kCapture; }

PoolId pool_of(const Machine& machine, std::uintptr_t address) {
  for (const SegmentSnapshot& segment : machine.device.segments())
    if (address >= segment.address && address < segment.address + segment.bytes)
      return segment.pool;
  check::fail(__FILE__, __LINE__, "no segment holds the address");
}

PoolStats stats_of(const Machine& machine, PoolId id) {
  for (const PoolStats& stats : machine.device.pool_stats())
    if (stats.id == id) return stats;
  check::fail(__FILE__, __LINE__, "no such pool");
}

TEST(the_filter_chooses_the_streams) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  CHECK(pool_of(machine, machine.allocate(100, kCapture)) == kPool);
  CHECK(pool_of(machine, machine.allocate(100, kMain)) == PoolId{});
  machine.device.end_pool(kPool);
  CHECK(pool_of(machine, machine.allocate(100, kCapture)) == PoolId{});
}

TEST(the_innermost_pool_wins) {
  Machine machine;
  machine.device.begin_pool(kPool, [](StreamId) { return true; });
  machine.device.begin_pool(kSecondPool, on_capture_stream);
  CHECK(pool_of(machine, machine.allocate(100, kCapture)) == kSecondPool);
  CHECK(pool_of(machine, machine.allocate(100, kMain)) == kPool);
  machine.device.end_pool(kSecondPool);
  CHECK(pool_of(machine, machine.allocate(100, kCapture)) == kPool);
  machine.device.end_pool(kPool);
}

TEST(blocks_stay_private) {
  for (const std::size_t bytes : {std::size_t{4096}, 12 * MiB}) {
    Machine machine;
    const std::uintptr_t before = machine.allocate(bytes, kCapture);
    machine.free(before);
    machine.device.begin_pool(kPool, on_capture_stream);
    const std::uintptr_t inside = machine.allocate(bytes, kCapture);
    CHECK(inside != before);  // not from the common cache
    machine.free(inside);
    CHECK_EQUAL(machine.allocate(bytes, kCapture), inside);
    machine.free(inside);
    machine.device.end_pool(kPool);
    CHECK_EQUAL(machine.allocate(bytes, kCapture), before);  // nor into it

    // A second graph may share the pool.
    machine.device.begin_pool(kPool, on_capture_stream);
    CHECK_EQUAL(machine.allocate(bytes, kCapture), inside);
    machine.device.end_pool(kPool);
  }
}

TEST(pools_are_counted) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  const std::uintptr_t address = machine.allocate(3 * MiB + 1, kCapture);
  machine.device.end_pool(kPool);
  PoolStats stats = stats_of(machine, kPool);
  CHECK_EQUAL(stats.reserved_bytes, 20 * MiB);
  CHECK_EQUAL(stats.allocated_bytes, 3 * MiB + 64 * KiB);
  CHECK(stats.in_use);
  machine.free(address);
  CHECK_EQUAL(stats_of(machine, kPool).allocated_bytes, 0U);
  CHECK_EQUAL(stats_of(machine, kPool).reserved_bytes, 20 * MiB);
  machine.device.release_pool(kPool);
  CHECK(!stats_of(machine, kPool).in_use);
}

// A replay may write to a block that no tensor holds any more.
TEST(segments_of_a_pool_in_use_survive) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  machine.free(machine.allocate(12 * MiB, kCapture));
  machine.device.end_pool(kPool);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 12 * MiB);

  machine.source.set_capacity(14 * MiB);
  CHECK_THROWS(OutOfMemory, machine.allocate(12 * MiB));
  CHECK_EQUAL(machine.source.held_bytes(), 12 * MiB);

  machine.device.release_pool(kPool);
  machine.allocate(12 * MiB);
  CHECK(machine.device.pool_stats().empty());
}

TEST(each_user_counts) {
  Machine machine;
  for (int graph = 0; graph < 2; ++graph) {
    machine.device.begin_pool(kPool, on_capture_stream);
    machine.free(machine.allocate(12 * MiB, kCapture));
    machine.device.end_pool(kPool);
  }
  machine.device.release_pool(kPool);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 12 * MiB);
  machine.device.release_pool(kPool);
  machine.device.release_pool(kPool);  // once too often changes nothing
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK(machine.device.pool_stats().empty());
}

TEST(live_blocks_outlast_their_pool) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  const std::uintptr_t address = machine.allocate(12 * MiB, kCapture);
  machine.device.end_pool(kPool);
  machine.device.release_pool(kPool);
  machine.device.empty_cache();
  CHECK(machine.source.holds(address, 12 * MiB));
  machine.free(address);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK(machine.device.pool_stats().empty());
}

TEST(released_while_begun) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  machine.device.release_pool(kPool);
  machine.device.empty_cache();
  const std::uintptr_t address = machine.allocate(12 * MiB, kCapture);
  CHECK(pool_of(machine, address) == kPool);
  machine.free(address);
  machine.device.end_pool(kPool);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK(machine.device.pool_stats().empty());
}

TEST(a_capture_grows_but_gives_nothing_back) {
  Machine machine;
  machine.free(machine.allocate(12 * MiB, kMain));
  machine.device.begin_pool(kPool, on_capture_stream);
  machine.driver.begin_capture(kCapture);
  CHECK(pool_of(machine, machine.allocate(30 * MiB, kCapture)) == kPool);
  machine.device.empty_cache();  // freeing a segment now would break the capture
  CHECK_EQUAL(machine.source.held_segments(), 2U);
  machine.source.set_capacity(machine.source.held_bytes());
  CHECK_THROWS(OutOfMemory, machine.allocate(2 * MiB, kCapture));
  CHECK_EQUAL(machine.source.held_segments(), 2U);
  machine.driver.end_capture(kCapture);
  machine.device.end_pool(kPool);
  machine.allocate(12 * MiB, kSide);  // now the cache is given back for it
}

// An event recorded in a capture would be a node of the graph, and the fake driver fails on it.
TEST(streams_are_recorded_after_the_capture) {
  Machine machine;
  const std::uintptr_t outside = machine.allocate(12 * MiB, kMain);
  machine.device.begin_pool(kPool, on_capture_stream);
  machine.driver.begin_capture(kCapture);
  machine.free_used(outside, kCapture);
  CHECK_EQUAL(machine.driver.events(), 0U);
  CHECK(machine.allocate(12 * MiB, kMain) != outside);

  machine.driver.end_capture(kCapture);
  machine.driver.launch(kCapture);  // the replay
  machine.device.end_pool(kPool);
  CHECK_EQUAL(machine.driver.events(), 1U);
  CHECK(machine.allocate(12 * MiB, kMain) != outside);
  machine.driver.finish(kCapture);
  CHECK_EQUAL(machine.allocate(12 * MiB, kMain), outside);
}

// A pool may also be begun with no capture under way; then nothing needs to be put off.
TEST(other_streams_are_recorded_at_once) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  const std::uintptr_t address = machine.allocate(12 * MiB, kCapture);
  machine.driver.launch(kSide);
  machine.free_used(address, kSide);
  CHECK_EQUAL(machine.driver.events(), 1U);
  CHECK(machine.allocate(12 * MiB, kCapture) != address);
  machine.driver.finish(kSide);
  CHECK_EQUAL(machine.allocate(12 * MiB, kCapture), address);
  machine.device.end_pool(kPool);
}

TEST(an_allocator_may_end_within_a_capture) {
  Machine machine;
  machine.device.begin_pool(kPool, on_capture_stream);
  machine.driver.begin_capture(kCapture);
  const std::uintptr_t address = machine.allocate(4096, kCapture);
  machine.free_used(address, kSide);
}

}  // namespace
}  // namespace umem
