// Page-locked memory that is locked ahead, by a thread, serves requests, and holds nobody else up.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr TensorClass kState = TensorClass::optimizer_state;

Config pinned_state() {
  Config config = config_of(MemoryKind::device);
  setting_of(config, kState).kind = MemoryKind::pinned;
  return config;
}

std::size_t locked_bytes(const Machine& machine) {
  return static_cast<std::size_t>(machine.device.stats().locked_ahead_bytes);
}

void wait_until_locked(const Machine& machine, std::size_t bytes) {
  while (locked_bytes(machine) < bytes) std::this_thread::yield();
}

// Holds a call of the source up until it is told to go on.
class HeldUp {
 public:
  explicit HeldUp(Machine& machine) {
    machine.source.slow.during("allocate", [this] {
      is_under_way_ = true;
      while (!goes_on_) std::this_thread::yield();
    });
  }
  void wait() const {
    while (!is_under_way_) std::this_thread::yield();
  }
  void let_go() { goes_on_ = true; }

 private:
  std::atomic<bool> is_under_way_ = false, goes_on_ = false;
};

TEST(homes_are_served_from_it) {
  Machine machine({.config = pinned_state()});
  machine.device.lock_ahead({64 * MiB, 32 * MiB}, 0, kState);
  wait_until_locked(machine, 96 * MiB);
  const std::size_t requests = machine.source.requests();
  CHECK_EQUAL(requests, 2U);
  for (int i = 0; i < 3; ++i) machine.allocate(32 * MiB, 0, kState);
  CHECK_EQUAL(machine.source.requests(), requests);
  machine.allocate(2 * MiB, 0, kState);  // what the estimate lacks
  CHECK_EQUAL(machine.source.requests(), requests + 1);
  CHECK_EQUAL(locked_bytes(machine), 96 * MiB);
}

TEST(what_is_left_goes_back) {
  Machine machine({.config = pinned_state()});
  const std::uintptr_t on_device = machine.allocate(20 * MiB);
  machine.free(on_device);
  machine.device.lock_ahead({64 * MiB, 32 * MiB}, 0, kState);
  wait_until_locked(machine, 96 * MiB);
  machine.allocate(32 * MiB, 0, kState);
  machine.device.end_locking_ahead(false);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 96 * MiB);
  machine.device.lock_ahead({KiB}, 0, kState);
  machine.device.end_locking_ahead(true);
  machine.device.end_locking_ahead(false);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 32 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::device), 20 * MiB);  // its cache stays
}

TEST(a_request_waits_for_the_segment_that_serves_it) {
  Machine machine({.config = pinned_state()});
  HeldUp held(machine);
  machine.device.lock_ahead({64 * MiB}, 0, kState);
  held.wait();
  std::thread home([&] { machine.allocate(48 * MiB, 0, kState); });
  while (machine.device.stats().allocation.all.allocated == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    held.let_go();
  }
  home.join();
  CHECK_EQUAL(machine.source.requests(), 1U);
  CHECK(machine.device.stats().uncached_ns >= 1'000'000);
}

TEST(nothing_else_waits) {
  Machine machine({.config = pinned_state()});
  HeldUp held(machine);
  machine.device.lock_ahead({64 * MiB}, 0, kState);
  held.wait();
  machine.free(machine.allocate(100 * MiB));      // device memory, new
  machine.allocate(100 * MiB, 0, kState);         // larger than the segment
  machine.allocate(10 * MiB, 7, kState);          // another stream's
  machine.allocate(KiB, 0, kState);               // a small block
  machine.device.empty_cache();
  held.let_go();
  wait_until_locked(machine, 64 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 176 * MiB);
}

TEST(limits_hold) {
  Config config = pinned_state();
  config.pinned_limit_bytes = 100 * MiB;
  Machine machine({.config = config});
  machine.device.lock_ahead({64 * MiB, 64 * MiB, 2 * MiB}, 0, kState);
  wait_until_locked(machine, 64 * MiB);
  machine.device.end_locking_ahead(false);
  CHECK_EQUAL(machine.source.held_bytes(), 64 * MiB);
  machine.allocate(64 * MiB, 0, kState);
  machine.allocate(36 * MiB, 0, kState);
  CHECK_THROWS(OutOfMemory, machine.allocate(2 * MiB, 0, kState));
}

TEST(a_refusal_leaves_nothing) {
  for (const bool throws : {false, true}) {
    Config config = pinned_state();
    config.pinned_limit_bytes = 100 * MiB;
    Machine machine({.config = config});
    machine.source.set_throws(throws);
    machine.source.set_capacity(MemoryKind::pinned, MiB);
    HeldUp held(machine);
    machine.device.lock_ahead({100 * MiB, 100 * MiB}, 0, kState);
    held.wait();
    held.let_go();
    machine.device.end_locking_ahead(false);
    CHECK_EQUAL(locked_bytes(machine), 0U);
    machine.source.set_throws(false);
    machine.source.set_capacity(MemoryKind::pinned, 0);
    machine.allocate(100 * MiB, 0, kState);
  }
}

// Segments whose address would have to be rounded are left to the requests.
TEST(a_source_of_other_alignment) {
  Machine machine({.config = pinned_state(), .offset_bytes = 256});
  HeldUp held(machine);
  machine.device.lock_ahead({64 * MiB}, 0, kState);
  held.wait();
  held.let_go();
  machine.device.end_locking_ahead(false);
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
}

TEST(other_classes_have_none) {
  Machine machine({.config = pinned_state()});
  machine.device.lock_ahead({64 * MiB}, 0, TensorClass::weights);
  machine.device.lock_ahead({}, 0, kState);
  machine.device.end_locking_ahead(true);
  CHECK_EQUAL(machine.source.requests(), 0U);
}

TEST(a_pause_ends_it) {
  Machine machine({.config = pinned_state(), .virtual_memory = true});
  HeldUp held(machine);
  machine.device.lock_ahead(std::vector<std::size_t>(100, 64 * MiB), 0, kState);
  held.wait();
  std::thread pause([&] { machine.device.pause(64 * GiB); });
  held.let_go();
  pause.join();
  CHECK(machine.device.is_paused());
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  machine.device.lock_ahead({64 * MiB}, 0, kState);
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  machine.device.resume();
}

// The child has no such thread, and what it asks for does not wait for one.
TEST(a_fork_amid_it) {
  Machine machine({.config = pinned_state()});
  HeldUp held(machine);
  machine.device.lock_ahead({64 * MiB, 64 * MiB}, 0, kState);
  held.wait();
  machine.allocator.lock_all();
  const pid_t child = fork();
  machine.allocator.unlock_all();
  if (child == 0) {
    alarm(20);  // kills the child, and so fails the test
    machine.allocate(48 * MiB, 0, kState);
    machine.device.end_locking_ahead(true);
    _exit(EXIT_SUCCESS);
  }
  CHECK(child > 0);
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), EXIT_SUCCESS);
  held.let_go();
  wait_until_locked(machine, 128 * MiB);
}

TEST(threads_allocate_beside_it) {
  Machine machine({.config = pinned_state(), .virtual_memory = true});
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < 4; ++number)
    threads.emplace_back([&machine, number] {
      for (std::size_t i = 0; i < 50; ++i) {
        const TensorClass its = i % 2 == 0 ? kState : TensorClass::activations;
        machine.free(machine.allocate((1 + (number + i) % 9) * 2 * MiB, 0, its));
        if (i % 10 == number) machine.device.empty_cache();
      }
    });
  for (int i = 0; i < 20; ++i) {
    machine.device.lock_ahead({8 * MiB, 4 * MiB, 16 * MiB, 2 * MiB}, 0, kState);
    if (i % 3 == 0) machine.device.end_locking_ahead(i % 2 == 0);
  }
  for (std::thread& thread : threads) thread.join();
  machine.device.lock_ahead({2 * MiB}, 0, kState);
  machine.device.end_locking_ahead(true);
  machine.device.end_locking_ahead(false);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 0U);
}

}  // namespace
}  // namespace umem
