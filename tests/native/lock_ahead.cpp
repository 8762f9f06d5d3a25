// Page-locked memory that is locked ahead, by a thread, serves requests, and holds nobody else up.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr TensorClass kState = TensorClass::optimizer_state;

// State is page-locked, up to 3 GiB. The first call for it can be held up.
class Host : public Machine {
 public:
  Host() : Machine({.config = config(), .virtual_memory = true}) {
    source.slow.during("allocate", [this] {
      is_asked_ = true;
      while (is_held) std::this_thread::yield();
    });
  }
  void lock(std::size_t bytes) {
    device.lock_ahead(bytes, 0, kState);
    while (!is_asked_) std::this_thread::yield();
  }
  void wait_for(std::size_t bytes) const {
    while (device.stats().locked_ahead_bytes < static_cast<std::int64_t>(bytes))
      std::this_thread::yield();
  }
  std::size_t pinned() const { return source.held_bytes(MemoryKind::pinned); }

  std::atomic<bool> is_held = false;

 private:
  static Config config() {
    Config config = config_of(MemoryKind::device);
    setting_of(config, kState).kind = MemoryKind::pinned;
    config.pinned_limit_bytes = 3 * GiB;
    return config;
  }
  std::atomic<bool> is_asked_ = false;
};

TEST(homes_are_served_and_the_rest_goes_back) {
  Host host;
  host.lock(2 * GiB + 40 * MiB);
  host.wait_for(2 * GiB + 40 * MiB);
  for (int i = 0; i < 17; ++i) host.allocate(64 * MiB, 0, kState);
  CHECK_EQUAL(host.source.requests(), 3U);
  host.device.end_locking_ahead(true);
  host.device.end_locking_ahead(false);
  CHECK_EQUAL(host.pinned(), 2 * GiB);
}

TEST(one_request_waits_and_no_other) {
  Host host;
  host.is_held = true;
  host.lock(64 * MiB);
  host.free(host.allocate(100 * MiB));     // device memory, new
  host.allocate(100 * MiB, 0, kState);     // larger
  host.allocate(10 * MiB, 7, kState);      // another stream's
  std::thread home([&] { host.allocate(48 * MiB, 0, kState); });
  while (host.device.stats().allocation.all.current < 3) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    host.is_held = false;
  }
  home.join();
  CHECK_EQUAL(host.pinned(), 174 * MiB);
}

TEST(refusals_end_it) {
  Host limited, full, throwing;
  limited.lock(8 * GiB);
  full.source.set_capacity(MemoryKind::pinned, GiB + MiB);
  full.lock(8 * GiB);
  throwing.source.set_throws(true);
  throwing.lock(GiB);
  limited.wait_for(3 * GiB);
  full.wait_for(GiB);
  for (Host* host : {&limited, &full, &throwing}) host->device.end_locking_ahead(false);
  CHECK_EQUAL(limited.pinned() + full.pinned() + throwing.pinned(), 4 * GiB);
  throwing.source.set_throws(false);
  throwing.allocate(3 * GiB, 0, kState);  // what was refused is not counted
}

TEST(a_pause_ends_it) {
  Host host;
  host.is_held = true;
  host.lock(3 * GiB);
  std::thread pause([&] { host.device.pause(64 * GiB); });
  host.is_held = false;
  pause.join();
  host.device.lock_ahead(GiB, 0, kState);
  CHECK_EQUAL(host.source.held_bytes(), 0U);
  host.device.resume();
}

// What a child asks for waits for no thread.
TEST(a_fork_amid_it) {
  Host host;
  host.is_held = true;
  host.lock(64 * MiB);
  host.allocator.lock_all();
  const pid_t child = fork();
  host.allocator.unlock_all();
  if (child == 0) {
    alarm(20);  // kills the child, and so fails the test
    host.allocate(48 * MiB, 0, kState);
    host.device.end_locking_ahead(true);
    _exit(EXIT_SUCCESS);
  }
  host.is_held = false;
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
}

TEST(threads_allocate_beside_it) {
  Host host;
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < 4; ++number)
    threads.emplace_back([&host, number] {
      for (std::size_t i = 0; i < 60; ++i) {
        const TensorClass its = i % 2 == 0 ? kState : TensorClass::activations;
        host.free(host.allocate((1 + (number + i) % 9) * 2 * MiB, 0, its));
        if (i % 10 == number) host.device.empty_cache();
        if (i % 7 == number) host.device.lock_ahead(32 * MiB, 0, kState);
        if (i % 9 == number) host.device.end_locking_ahead(i % 2 == 0);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace umem
