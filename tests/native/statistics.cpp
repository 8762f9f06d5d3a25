// Statistics with torch's names: exact after every step, with peaks and resets.
#include "fake_driver.hpp"

namespace umem {
namespace {

void check_stat(const char* what, const Stat& stat, const Stat& expected) {
  if (stat.current != expected.current || stat.peak != expected.peak ||
      stat.allocated != expected.allocated || stat.freed != expected.freed)
    check::fail(__FILE__, __LINE__,
                std::string(what) + " is " + std::to_string(stat.current) + " (peak " +
                    std::to_string(stat.peak) + ", allocated " + std::to_string(stat.allocated) +
                    ", freed " + std::to_string(stat.freed) + "), expected " +
                    std::to_string(expected.current) + " (" + std::to_string(expected.peak) + ", " +
                    std::to_string(expected.allocated) + ", " + std::to_string(expected.freed) +
                    ")");
}

constexpr std::int64_t mib(double count) {
  return static_cast<std::int64_t>(count * static_cast<double>(MiB));
}

TEST(every_figure_of_a_short_life) {
  Machine machine;
  const std::uintptr_t small = machine.allocate(1000, 0, TensorClass::gradients);
  const std::uintptr_t large = machine.allocate(4 * MiB - 1, 0, TensorClass::activations);
  machine.free(small);

  const DeviceStats stats = machine.device.stats();
  check_stat("allocation", stats.allocation.all, {1, 2, 2, 1});
  check_stat("small allocation", stats.allocation.small_pool, {0, 1, 1, 1});
  check_stat("large allocation", stats.allocation.large_pool, {1, 1, 1, 0});
  check_stat("allocated bytes", stats.allocated_bytes.all,
             {mib(4), mib(4) + 1024, mib(4) + 1024, 1024});
  check_stat("requested bytes", stats.requested_bytes.all,
             {mib(4) - 1, mib(4) + 999, mib(4) + 999, 1000});
  check_stat("small requested bytes", stats.requested_bytes.small_pool, {0, 1000, 1000, 1000});
  check_stat("active", stats.active.all, {1, 2, 2, 1});
  check_stat("active bytes", stats.active_bytes.large_pool, {mib(4), mib(4), mib(4), 0});
  check_stat("segments", stats.segment.all, {2, 2, 2, 0});
  check_stat("reserved bytes", stats.reserved_bytes.small_pool, {mib(2), mib(2), mib(2), 0});
  check_stat("reserved bytes", stats.reserved_bytes.large_pool, {mib(20), mib(20), mib(20), 0});
  // The rest of the large segment; that of the small one has its segment to itself again.
  check_stat("inactive split", stats.inactive_split.all, {1, 2, 2, 1});
  check_stat("inactive split bytes", stats.inactive_split_bytes.large_pool,
             {mib(16), mib(16), mib(16), 0});
  check_stat("inactive split bytes", stats.inactive_split_bytes.small_pool,
             {0, mib(2) - 1024, mib(2) - 1024, mib(2) - 1024});
  CHECK_EQUAL(stats.num_device_alloc, 2);
  CHECK_EQUAL(stats.num_device_free, 0);

  machine.free(large);
  machine.device.empty_cache();
  const DeviceStats after = machine.device.stats();
  check_stat("segments", after.segment.all, {0, 2, 2, 2});
  check_stat("reserved bytes", after.reserved_bytes.all, {0, mib(22), mib(22), mib(22)});
  check_stat("inactive split", after.inactive_split.all, {0, 2, 2, 2});
  CHECK_EQUAL(after.num_device_free, 2);
}

TEST(requests_that_the_cache_has_no_memory_for_take_time) {
  Machine machine;
  machine.free(machine.allocate(4 * MiB));
  const std::int64_t after_growth_ns = machine.device.stats().uncached_ns;
  CHECK(after_growth_ns > 0);
  machine.free(machine.allocate(4 * MiB));
  CHECK_EQUAL(machine.device.stats().uncached_ns, after_growth_ns);
  machine.allocate(100 * MiB);
  CHECK(machine.device.stats().uncached_ns > after_growth_ns);
}

TEST(classes_are_counted) {
  Machine machine;
  const auto of = [&](TensorClass tensor_class) {
    return machine.device.stats().by_class[number_of(tensor_class)];
  };
  const std::uintptr_t address = machine.allocate(1000, 0, TensorClass::activations);
  check_stat("allocation", of(TensorClass::activations).allocation, {1, 1, 1, 0});
  check_stat("requested", of(TensorClass::activations).requested_bytes, {1000, 1000, 1000, 0});
  check_stat("allocated", of(TensorClass::activations).allocated_bytes, {1024, 1024, 1024, 0});

  CHECK(machine.device.retag(address, TensorClass::gradients));
  CHECK(machine.device.retag(address, TensorClass::gradients));  // already so: nothing changes
  check_stat("allocation", of(TensorClass::activations).allocation, {0, 1, 1, 1});
  check_stat("requested", of(TensorClass::activations).requested_bytes, {0, 1000, 1000, 1000});
  check_stat("allocation", of(TensorClass::gradients).allocation, {1, 1, 1, 0});
  check_stat("device", machine.device.stats().allocation.all, {1, 1, 1, 0});

  machine.free(address);
  check_stat("allocated", of(TensorClass::gradients).allocated_bytes, {0, 1024, 1024, 1024});
  CHECK(!machine.device.retag(address, TensorClass::weights));
}

TEST(peaks_start_again_from_now) {
  Machine machine;
  const std::uintptr_t kept = machine.allocate(4 * MiB, 0, TensorClass::weights);
  machine.free(machine.allocate(8 * MiB, 0, TensorClass::weights));
  machine.device.reset_peak_stats();
  DeviceStats stats = machine.device.stats();
  check_stat("allocated bytes", stats.allocated_bytes.all, {mib(4), mib(4), mib(12), mib(8)});
  check_stat("of weights", stats.by_class[0].allocated_bytes, {mib(4), mib(4), mib(12), mib(8)});
  check_stat("segments", stats.segment.all, {1, 1, 1, 0});
  machine.allocate(2 * MiB);
  CHECK_EQUAL(machine.device.stats().allocated_bytes.all.peak, mib(6));

  machine.device.reset_accumulated_stats();
  stats = machine.device.stats();
  check_stat("allocated bytes", stats.allocated_bytes.all, {mib(6), mib(6), 0, 0});
  check_stat("of weights", stats.by_class[0].allocated_bytes, {mib(4), mib(4), 0, 0});
  CHECK_EQUAL(stats.num_device_alloc, 0);
  CHECK_EQUAL(stats.highest_bytes, mib(12));  // nothing makes it less
  machine.free(kept);
  check_stat("of weights", machine.device.stats().by_class[0].allocated_bytes,
             {0, mib(4), 0, mib(4)});
}

TEST(kinds_are_counted) {
  Config config;
  setting_of(config, TensorClass::optimizer_state).kind = MemoryKind::pinned;
  Machine machine({.config = config});
  machine.allocate(30 * MiB, 0, TensorClass::optimizer_state);
  machine.allocate(10 * MiB, 0, TensorClass::weights);
  const auto kinds = machine.device.kind_stats();
  for (std::size_t kind = 0; kind < kKinds; ++kind)
    CHECK_EQUAL(kinds[kind].reserved_bytes,
                machine.source.held_bytes(static_cast<MemoryKind>(kind)));
  CHECK_EQUAL(kinds[number_of(MemoryKind::pinned)].reserved_bytes, 30 * MiB);
  CHECK_EQUAL(machine.device.stats().reserved_bytes.all.current, mib(40));
}

TEST(devices_are_counted_apart) {
  Machine machine({.config = {}, .devices = 2});
  machine.allocate(1000);
  machine.allocator.classes().set_phase(TensorClass::gradients);
  const std::uintptr_t address = machine.allocate_on(1, 3 * MiB);
  CHECK_EQUAL(machine.device.stats().allocation.all.current, 1);
  CHECK_EQUAL(machine.allocator.device(1).stats().requested_bytes.all.current, mib(3));
  const std::vector<LiveBlock> live = machine.allocator.live_blocks();
  CHECK_EQUAL(live.size(), 2U);
  CHECK_EQUAL(live[1].address, address);
  CHECK_EQUAL(live[1].device, 1);
  CHECK(live[1].tensor_class == TensorClass::gradients);
  machine.allocator.device(1).reset_peak_stats();
  CHECK(machine.allocator.retag(address, TensorClass::weights));
  CHECK(!machine.allocator.retag(address + 1, TensorClass::weights));
}

TEST(peaks_are_taken_apart_from_the_statistics) {
  Machine machine;
  const std::uintptr_t kept = machine.allocate(4 * MiB);
  machine.free(machine.allocate(6 * MiB));
  machine.device.reset_peak_stats();
  CHECK_EQUAL(machine.device.take_peak_bytes(), 10 * MiB);
  CHECK_EQUAL(machine.device.take_peak_bytes(), 4 * MiB);  // what lives is its own peak
  machine.free(machine.allocate(2 * MiB));
  machine.free(kept);
  CHECK_EQUAL(machine.device.take_peak_bytes(), 6 * MiB);
  CHECK_EQUAL(machine.device.take_peak_bytes(), 0U);
  CHECK_EQUAL(machine.device.stats().allocated_bytes.all.peak, mib(6));  // since its own reset
}

}  // namespace
}  // namespace umem
