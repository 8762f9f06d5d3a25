// Without a cache every block is a segment, and every free goes back to the source.
#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr PoolId kPool{0, 1};
constexpr StreamId kMain = 0, kCapture = 5, kSide = 7;

MachineSettings uncached() {
  Config config;
  config.caching = false;
  return {.config = config};
}

void the_source_sees_every_request() {
  Machine machine(uncached());
  std::size_t requests = 0;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, MiB, 3 * MiB + 1, 30 * MiB}) {
    const std::uintptr_t address = machine.allocate(bytes);
    CHECK_EQUAL(machine.source.requests(), ++requests);
    CHECK_EQUAL(machine.source.held_bytes(),
                round_up(bytes, bytes < kPageBytes ? kMinBlockBytes : kLargeStepBytes));
    CHECK_EQUAL(machine.device.stats().reserved_bytes.all.current,
                static_cast<std::int64_t>(machine.source.held_bytes()));
    CHECK_EQUAL(machine.device.stats().inactive_split.all.current, 0);
    check_consistent(machine.device);
    machine.free(address);
    CHECK_EQUAL(machine.source.held_bytes(), 0U);
    CHECK(!machine.device.free(address));
  }
  check_consistent(machine.device);
}

void a_block_in_use_elsewhere_goes_back_later() {
  Machine machine(uncached());
  const std::uintptr_t address = machine.allocate(3 * MiB);
  machine.driver.launch(kSide);
  machine.device.record_stream(address, kSide);
  machine.free(address);
  machine.free(machine.allocate(1));
  CHECK_EQUAL(machine.source.held_bytes(), 3 * MiB);
  machine.driver.finish(kSide);
  machine.free(machine.allocate(1));
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
}

// A graph writes to its blocks at every replay, whether or not a tensor holds them.
void a_pool_in_use_keeps_its_blocks() {
  Machine machine(uncached());
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  const std::uintptr_t scratch = machine.allocate(3 * MiB, kCapture);
  const std::uintptr_t output = machine.allocate(3 * MiB, kCapture);
  machine.free(scratch);
  CHECK_EQUAL(machine.source.held_bytes(), 6 * MiB);
  machine.device.end_pool(kPool);
  machine.free(output);
  CHECK_EQUAL(machine.source.held_bytes(), 6 * MiB);

  machine.device.release_pool(kPool);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  check_consistent(machine.device);
}

// Freeing a segment would break a capture on any stream.
void nothing_goes_back_during_a_capture() {
  Machine machine(uncached());
  const std::uintptr_t outside = machine.allocate(3 * MiB, kMain);
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  machine.free(outside);
  CHECK_EQUAL(machine.source.held_bytes(), 3 * MiB);
  CHECK_EQUAL(machine.allocate(2 * MiB, kMain), outside);
  machine.free(outside);
  machine.device.end_pool(kPool);
  machine.device.release_pool(kPool);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  check_consistent(machine.device);
}

}  // namespace
}  // namespace umem

int main() {
  using namespace umem;
  RUN(the_source_sees_every_request);
  RUN(a_block_in_use_elsewhere_goes_back_later);
  RUN(a_pool_in_use_keeps_its_blocks);
  RUN(nothing_goes_back_during_a_capture);
}
