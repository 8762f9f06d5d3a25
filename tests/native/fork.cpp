// A forked child finds every lock free, whatever other threads were doing.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr unsigned kDeadlockSeconds = 20;

void use(Allocator& allocator, int device, StreamId stream) {
  ClassContext& classes = allocator.classes();
  const std::uint64_t token = classes.enter(TensorClass::other);
  DeviceAllocator& on = allocator.device(device);
  const auto address = reinterpret_cast<std::uintptr_t>(allocator.allocate(4096, device, stream));
  CHECK(allocator.record_stream(address, stream + 1));
  CHECK(on.free(address));
  CHECK(classes.leave(token));
}

TEST(a_child_can_allocate) {
  Machine machine({.config = {}, .devices = 2});
  Allocator& allocator = machine.allocator;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int device = 0; device < 2; ++device)
    threads.emplace_back([&, device] {
      while (!stop) use(allocator, device, 0);
    });

  for (int i = 0; i < 20; ++i) {
    allocator.lock_all();
    const pid_t child = fork();
    if (child == 0) {
      alarm(kDeadlockSeconds);  // kills the child, and so fails the test
      allocator.unlock_all();
      for (int device = 0; device < 2; ++device) use(allocator, device, 3);
      _exit(EXIT_SUCCESS);
    }
    allocator.unlock_all();
    CHECK(child > 0);
    int status = 0;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), EXIT_SUCCESS);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  for (int device = 0; device < 2; ++device) check_consistent(allocator.device(device));
}

}  // namespace
}  // namespace umem
