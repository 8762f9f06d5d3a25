// Other threads free tensors and read statistics while a device is paused and resumed.
#include <thread>

#include "steps.hpp"

namespace umem {
namespace {

TEST(frees_beside_pauses) {
  Machine machine = machine_of(0);
  std::vector<std::uintptr_t> live;
  for (int i = 0; i < 200; ++i) live.push_back(machine.allocate(MiB * (1 + i % 9), i % 3));
  std::thread other([&] {
    for (const std::uintptr_t address : live) {
      machine.free_used(address, kSide);
      machine.device.stats();
      machine.device.segments();
    }
  });
  for (int i = 0; i < 20; ++i) {
    machine.device.pause(64 * GiB);
    CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
    machine.device.resume();
  }
  other.join();
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
}

// A thread that allocates meets a paused device or one that runs, and gets an error or memory.
TEST(allocations_beside_pauses) {
  Machine machine = machine_of(0);
  std::thread other([&] {
    for (int i = 0; i < 500; ++i) {
      try {
        machine.free(machine.allocate(MiB * (1 + i % 9)));
      } catch (const PauseError&) {
      }
    }
  });
  for (int i = 0; i < 20; ++i) {
    machine.device.pause(64 * GiB);
    machine.device.resume();
  }
  other.join();
}

}  // namespace
}  // namespace umem
