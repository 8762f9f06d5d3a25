// Page-locked memory that is locked ahead, by a thread, serves requests, and holds nobody else up.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "fake_driver.hpp"

namespace umem {
namespace {

// Optimizer state is page-locked, up to 3 GiB. The first call for it can be held up.
struct Host : Machine {
  Host() : Machine({.config = config(), .virtual_memory = true}) {}
  static Config config() {
    Config config = config_of(MemoryKind::device);
    setting_of(config, TensorClass::optimizer_state).kind = MemoryKind::pinned;
    config.pinned_limit_bytes = 3 * GiB;
    return config;
  }
  void lock(std::size_t bytes, bool is_held = false) {
    held = is_held;
    source.slow.during("allocate", [this] {
      asked = true;
      while (held) std::this_thread::yield();
    });
    device.lock_ahead(bytes, 0);
    while (!asked) std::this_thread::yield();
  }
  void allocate_state(std::size_t bytes, StreamId stream = 0) {
    allocate(bytes, stream, TensorClass::optimizer_state);
  }
  std::size_t locked() const {
    return static_cast<std::size_t>(device.stats().locked_ahead_bytes);
  }
  std::atomic<bool> held = false, asked = false;
};

TEST(homes_are_served_within_limits) {
  Host host;
  host.lock(8 * GiB);
  while (host.locked() < 3 * GiB) std::this_thread::yield();
  for (int i = 0; i < 17; ++i) host.allocate_state(64 * MiB);
  CHECK_EQUAL(host.source.requests(), 3U);
  host.device.empty_cache();
  CHECK_EQUAL(host.source.held_bytes(), 2 * GiB);
}

TEST(one_request_waits_and_no_other) {
  Host host;
  host.lock(64 * MiB, true);
  host.allocate(100 * MiB);           // of the device
  host.allocate_state(100 * MiB);     // larger
  host.allocate_state(10 * MiB, 7);   // another stream's
  std::thread home([&] { host.allocate_state(48 * MiB); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  host.held = false;
  home.join();
  CHECK_EQUAL(host.source.held_bytes(MemoryKind::pinned), 174 * MiB);
}

TEST(a_refusal_leaves_nothing) {
  Host host;
  host.source.set_throws(true);
  host.lock(3 * GiB);
  host.device.end_locking_ahead();
  host.source.set_throws(false);
  host.allocate_state(3 * GiB);
  CHECK_EQUAL(host.locked(), 0U);
}

// What a child asks for waits for no thread.
TEST(a_fork_and_a_pause_amid_it) {
  Host host;
  host.lock(3 * GiB, true);
  host.allocator.lock_all();
  const pid_t child = fork();
  host.allocator.unlock_all();
  if (child == 0) {
    alarm(20);  // kills the child, and so fails the test
    host.allocate_state(48 * MiB);
    host.device.end_locking_ahead();
    _exit(EXIT_SUCCESS);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
  std::thread pause([&] { host.device.pause(64 * GiB); });
  host.held = false;
  pause.join();
  host.device.lock_ahead(GiB, 0);
  CHECK_EQUAL(host.source.held_bytes(), 0U);
  host.device.resume();
}

}  // namespace
}  // namespace umem
