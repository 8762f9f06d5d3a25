// While a call of the driver takes long, other threads use the cache, free, and read statistics. The
// slow call returns when they are done, so a test hangs where they have to wait for it.
#include <atomic>
#include <chrono>
#include <thread>

#include "steps.hpp"

namespace umem {
namespace {

constexpr Advice kOnDevice{.placement = Placement::device, .accessed_by_device = true};

// A machine with cached blocks of 1 MiB, and live ones that another thread may free.
class Busy {
 public:
  explicit Busy(const MachineSettings& settings) : machine(settings) {
    std::vector<std::uintptr_t> cached;
    for (int i = 0; i < 8; ++i) {
      cached.push_back(machine.allocate(MiB));
      live_.push_back(machine.allocate(MiB));
    }
    for (const std::uintptr_t address : cached) machine.free(address);
  }

  // Another thread works during the call of this name, which `act` makes. `cache_stays`: there is
  // cached memory then.
  template <class Act>
  void expect_others_work(SlowCalls& calls, const char* name, Act act, bool cache_stays = true) {
    bool worked = false;
    calls.during(name, [&] {
      std::thread([&] {
        if (cache_stays) machine.free(machine.allocate(MiB));
        machine.device.record_stream(live_.back(), 7);
        machine.driver.finish(7);
        machine.device.retag(live_.back(), TensorClass::weights);
        machine.free(live_.back());
        live_.pop_back();
        if (cache_stays) check_consistent(machine.device);
      }).join();
      worked = true;
    });
    act();
    CHECK(worked);
    check_consistent(machine.device);
  }

  Machine machine;

 private:
  std::vector<std::uintptr_t> live_;
};

void a_new_segment() {
  Busy busy({.config = config_of(MemoryKind::managed, kOnDevice)});
  const auto grow = [&] { busy.machine.allocate(100 * MiB); };
  busy.expect_others_work(busy.machine.source.slow, "allocate", grow);
  busy.expect_others_work(busy.machine.driver.slow, "advise", grow);
  busy.expect_others_work(busy.machine.driver.slow, "populate", grow);
}

void memory_that_goes_back() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  const auto give_back = [&] {
    busy.machine.free(busy.machine.allocate(100 * MiB));
    busy.machine.device.empty_cache();
  };
  busy.expect_others_work(busy.machine.source.slow, "deallocate", give_back, false);
  CHECK_EQUAL(busy.machine.source.held_bytes(), busy.machine.device.segments().front().bytes *
                                                    busy.machine.device.segments().size());
}

void a_release_listener() {
  struct Listener final : ReleaseListener {
    void before_release(std::span<const Range> ranges) noexcept override {
      for (const Range& range : ranges) bytes += range.bytes;
      calls.enter("before_release");
    }
    SlowCalls calls;
    std::size_t bytes = 0;
  };
  const auto listener = std::make_shared<Listener>();
  Busy busy({.config = config_of(MemoryKind::managed)});
  busy.machine.device.set_release_listener(listener);
  busy.expect_others_work(
      listener->calls, "before_release",
      [&] {
        busy.machine.free(busy.machine.allocate(100 * MiB));
        busy.machine.device.empty_cache();
      },
      false);
  CHECK(listener->bytes >= 100 * MiB);
}

// Ordinary memory goes back behind the work of its stream.
void system_memory() {
  Config config = config_of(MemoryKind::system, kOnDevice);
  config.system_headroom_bytes = GiB;
  Busy busy({.config = config});
  const auto grow_and_give_back = [&] {
    busy.machine.free(busy.machine.allocate(100 * MiB));
    busy.machine.device.empty_cache();
  };
  for (const char* name : {"memory", "advise"})
    busy.expect_others_work(busy.machine.driver.slow, name, grow_and_give_back);
  busy.expect_others_work(busy.machine.driver.slow, "wait", grow_and_give_back, false);
}

void the_memory_of_the_card_is_asked_for() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  busy.machine.device.set_memory_fraction(0.5);
  busy.expect_others_work(busy.machine.driver.slow, "memory",
                          [&] { busy.machine.allocate(100 * MiB); });
  busy.machine.device.set_memory_fraction(1e-3);
  SlowCalls& calls = busy.machine.driver.slow;
  busy.expect_others_work(
      calls, "memory",
      [&] { CHECK_THROWS(OutOfMemory, busy.machine.allocate(100 * MiB)); }, false);
}

// A block that passes to a class with other advice, and a cached one that carries other advice.
void advice_anew() {
  Config config = config_of(MemoryKind::managed, kOnDevice);
  config.classes[static_cast<std::size_t>(TensorClass::weights)].advice.read_mostly = true;
  Busy busy({.config = config});
  Machine& machine = busy.machine;
  const std::uintptr_t address = machine.allocate(20 * MiB);
  busy.expect_others_work(machine.driver.slow, "advise",
                          [&] { machine.device.retag(address, TensorClass::weights); });
  machine.free(address);
  busy.expect_others_work(machine.driver.slow, "advise", [&] { machine.allocate(20 * MiB); });
}

// One of the spilled blocks is freed while another is advised.
void spilled_blocks_that_return() {
  Config config = budget_config(20 * MiB, MemoryKind::managed);
  Machine machine({.config = config});
  machine.allocate(20 * MiB);
  const std::uintptr_t first = machine.allocate(20 * MiB), second = machine.allocate(20 * MiB);
  machine.driver.slow.during("advise", [&] {
    std::thread([&] {
      machine.free(first);
      machine.free(second);
    }).join();
  });
  CHECK_EQUAL(machine.device.unspill().size(), 1U);
  CHECK_EQUAL(budget_bytes(machine), 20 * MiB);
  const std::size_t advised = machine.driver.advice().size();
  machine.allocate(20 * MiB);
  machine.allocate(20 * MiB);
  CHECK_EQUAL(machine.driver.advice().size(), advised + 1);  // only one carries other advice
  check_consistent(machine.device);
}

// A source that is full gets the cache back, and is asked once more.
void a_retry() {
  Busy busy({.config = config_of(MemoryKind::managed), .capacity_bytes = 140 * MiB});
  for (const char* name : {"allocate", "deallocate"}) {
    busy.machine.free(busy.machine.allocate(60 * MiB, 1));
    std::uintptr_t address = 0;
    busy.expect_others_work(
        busy.machine.source.slow, name, [&] { address = busy.machine.allocate(100 * MiB); },
        false);
    busy.machine.free(address);
    busy.machine.device.empty_cache();
  }
  CHECK_EQUAL(busy.machine.device.stats().num_alloc_retries, 2);
}

void peers() {
  Machine machine({.config = config_of(MemoryKind::device), .devices = 2, .virtual_memory = true});
  machine.allocator.allocate(MiB, 0, 0);
  machine.free(machine.allocate(MiB));
  bool worked = false;
  mapped(machine).slow.during("add_peer", [&] {
    std::thread([&] { machine.free(machine.allocate(MiB)); }).join();
    worked = true;
  });
  machine.allocator.allocate(MiB, 1, 0);
  CHECK(worked);
}

void the_work_of_other_streams() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  const std::uintptr_t address = busy.machine.allocate(100 * MiB);
  busy.machine.driver.launch(9);
  busy.machine.device.record_stream(address, 9);
  busy.machine.free(address);
  busy.expect_others_work(busy.machine.driver.slow, "wait",
                          [&] { busy.machine.device.empty_cache(); });
}

// A stream whose queue is full keeps the thread that frees, and no other one.
void events_of_other_streams() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  Machine& machine = busy.machine;
  const std::uintptr_t address = machine.allocate(20 * MiB);
  machine.driver.launch(9);
  machine.device.record_stream(address, 9);
  busy.expect_others_work(machine.driver.slow, "record", [&] { machine.free(address); });
  CHECK(machine.allocate(20 * MiB) != address);
  machine.driver.finish(9);
  CHECK_EQUAL(machine.allocate(20 * MiB), address);
}

// The event would be a node of the graph, never to be queried.
void a_capture_begins_behind_the_events() {
  Machine machine;
  const std::uintptr_t address = machine.allocate(MiB), other = machine.allocate(MiB);
  for (const std::uintptr_t it : {address, other}) machine.device.record_stream(it, 9);
  std::thread capture;
  std::atomic<bool> has_begun = false;
  machine.driver.slow.during("record", [&] {
    capture = std::thread([&] {
      machine.device.begin_pool({0, 1}, [](StreamId) { return true; });
      machine.driver.begin_capture(9);
      has_begun = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!has_begun);
    std::thread([&] { machine.free(other); }).join();  // events go on, beside who waits
  });
  machine.free(address);
  capture.join();
  machine.driver.end_capture(9);
  machine.device.end_pool({0, 1});
  check_consistent(machine.device);
}

void events_behind_a_capture() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  Machine& machine = busy.machine;
  const std::uintptr_t address = machine.allocate(20 * MiB);
  machine.device.record_stream(address, 9);
  machine.device.begin_pool({0, 1}, [](StreamId) { return false; });
  machine.driver.begin_capture(9);
  machine.free(address);
  machine.driver.end_capture(9);
  busy.expect_others_work(machine.driver.slow, "record",
                          [&] { machine.device.end_pool({0, 1}); });
  CHECK_EQUAL(machine.allocate(20 * MiB), address);
}

void mapped_handles() {
  Busy busy({.config = config_of(MemoryKind::device), .virtual_memory = true});
  SlowCalls& calls = mapped(busy.machine).slow;
  std::uintptr_t large = 0;
  for (const char* name : {"reserve", "create", "map"})
    busy.expect_others_work(calls, name, [&] { large = busy.machine.allocate(100 * MiB); });
  busy.machine.free(large);
  for (const char* name : {"unmap", "release"}) {
    busy.expect_others_work(calls, name, [&] { busy.machine.device.empty_cache(); }, false);
    busy.machine.free(busy.machine.allocate(100 * MiB));
  }
}

// Handles that were to move, and that a limit leaves without a place.
void handles_without_a_place() {
  Busy busy({.config = budget_config(100 * MiB), .virtual_memory = true});
  busy.machine.free(busy.machine.allocate(64 * MiB, 1));
  busy.machine.device.set_memory_fraction(1e-3);
  busy.expect_others_work(mapped(busy.machine).slow, "release", [&] {
    CHECK_THROWS(OutOfMemory, busy.machine.allocate(80 * MiB));
  });
}

// Frees go on; allocations wait, because the cache is about to lose its memory.
void a_pause() {
  Busy busy({.config = config_of(MemoryKind::device), .virtual_memory = true});
  Machine& machine = busy.machine;
  const auto pause = [&] {
    machine.device.pause(64 * GiB);
    machine.device.resume();
  };
  for (const char* name : {"synchronize", "copy"})
    busy.expect_others_work(machine.driver.slow, name, pause, false);
  for (const char* name : {"unmap", "map"})
    busy.expect_others_work(mapped(machine).slow, name, pause, false);
  for (const char* name : {"allocate", "deallocate"})
    busy.expect_others_work(machine.source.slow, name, pause, false);
}

void a_pause_of_managed_memory() {
  Busy busy({.config = config_of(MemoryKind::managed, kOnDevice)});
  for (const char* name : {"memory", "evict", "populate"})
    busy.expect_others_work(
        busy.machine.driver.slow, name,
        [&] {
          busy.machine.device.pause(64 * GiB);
          busy.machine.device.resume();
        },
        false);
}

void an_allocation_during_a_resume_waits() {
  Busy busy({.config = config_of(MemoryKind::device), .virtual_memory = true});
  Machine& machine = busy.machine;
  machine.device.pause(64 * GiB);
  std::thread other;
  machine.driver.slow.during("copy", [&] {
    other = std::thread([&] { machine.free(machine.allocate(MiB)); });
  });
  machine.device.resume();
  other.join();
  CHECK(!machine.device.is_paused());
}

// Both devices share the limit: what one has asked for counts before it has it.
void a_limit_that_two_devices_would_exceed() {
  Config config = config_of(MemoryKind::managed);
  config.managed_limit_bytes = 100 * MiB;
  Machine machine({.config = config, .devices = 2});
  bool refused = false;
  machine.source.slow.during("allocate", [&] {
    std::thread([&] {
      const StreamId stream = 0;
      refused = machine.allocator.device(1).try_allocate(60 * MiB, stream, TensorClass::other) ==
                nullptr;
    }).join();
  });
  machine.allocate(60 * MiB);
  CHECK(refused);
  CHECK_EQUAL(machine.source.held_bytes(), 60 * MiB);
}

// What a refused request counted is free again, also for a request that comes meanwhile.
void a_limit_after_a_refusal() {
  for (const bool throws : {false, true}) {
    Config config = config_of(MemoryKind::managed);
    config.managed_limit_bytes = 100 * MiB;
    Machine machine({.config = config});
    machine.source.set_throws(throws);
    if (!throws) machine.source.set_capacity(MiB);
    bool counted = false;
    machine.source.slow.during("allocate", [&] {
      counted = machine.allocator.managed_bytes() == 60 * MiB;
    });
    CHECK_THROWS(std::runtime_error, machine.allocate(60 * MiB));
    CHECK(counted);
    CHECK_EQUAL(machine.allocator.managed_bytes(), 0U);
    machine.source.set_throws(false);
    machine.source.set_capacity(0);
    machine.allocate(100 * MiB);
    check_consistent(machine.device);
  }
}

// One device: the second request waits for the first, and takes what that leaves.
void a_budget_that_two_threads_would_exceed() {
  for (const bool virtual_memory : {false, true}) {
    Machine machine({.config = budget_config(100 * MiB), .virtual_memory = virtual_memory});
    std::thread other;
    SlowCalls& calls = virtual_memory ? mapped(machine).slow : machine.source.slow;
    calls.during(virtual_memory ? "map" : "allocate",
                 [&] { other = std::thread([&] { machine.allocate(60 * MiB); }); });
    machine.allocate(60 * MiB);
    other.join();
    CHECK_EQUAL(budget_bytes(machine), 60 * MiB);
    CHECK(pinned_stats(machine).spilled_bytes >= 60 * MiB);
    check_consistent(machine.device);
  }
}

// A request that finds the first one's block when its turn comes takes that.
void two_threads_ask_for_the_same() {
  Machine machine({.config = config_of(MemoryKind::managed)});
  std::thread other;
  machine.source.slow.during("allocate", [&] {
    other = std::thread([&] { machine.free(machine.allocate(60 * MiB)); });
  });
  machine.free(machine.allocate(60 * MiB));
  other.join();
  CHECK(machine.device.segments().size() <= 2);
  check_consistent(machine.device);
}

// The handles are as many as were missing beside free memory, which another thread takes.
void free_memory_beside_new_handles_is_taken() {
  Machine machine({.config = config_of(MemoryKind::device), .virtual_memory = true});
  const std::uintptr_t end = machine.allocate(2 * kHandle);
  machine.free(end);
  std::uintptr_t taken = 0;
  mapped(machine).slow.during("map", [&] {
    std::thread([&] { taken = machine.allocate(2 * kHandle); }).join();
  });
  const std::uintptr_t address = machine.allocate(4 * kHandle);
  CHECK_EQUAL(taken, end);
  CHECK(mapped(machine).holds(address, 4 * kHandle));
  check_consistent(machine.device);
  machine.free(address);
  machine.free(taken);
}

void a_source_that_throws() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  busy.machine.source.set_throws(true);
  busy.expect_others_work(busy.machine.source.slow, "allocate", [&] {
    CHECK_THROWS(std::runtime_error, busy.machine.allocate(100 * MiB));
  });
  busy.machine.source.set_throws(false);
  busy.machine.allocate(100 * MiB);
  check_consistent(busy.machine.device);
}

// What else changes the device's memory waits for its turn, a fork and a capture included.
void everything_else_in_between() {
  Busy busy({.config = config_of(MemoryKind::managed)});
  Machine& machine = busy.machine;
  const std::vector<std::function<void()>> acts = {
      [&] { machine.allocator.empty_cache(); },
      [&] {
        machine.device.pause(64 * GiB);
        machine.device.resume();
      },
      [&] {
        machine.device.begin_pool({1, 1}, [](StreamId stream) { return stream == 5; });
        machine.device.end_pool({1, 1});
        machine.device.release_pool({1, 1});
      },
      [&] {
        machine.allocator.lock_all();
        machine.allocator.unlock_all();
      },
      [&] { machine.device.set_device_budget(GiB); },
      [&] { machine.device.set_release_listener(nullptr); }};
  for (const auto& act : acts) {
    std::thread other;
    machine.source.slow.during("allocate", [&] { other = std::thread(act); });
    const std::uintptr_t address = machine.allocate(100 * MiB);
    other.join();
    CHECK(machine.source.holds(address, 100 * MiB));
    machine.free(address);
    machine.device.empty_cache();
    check_consistent(machine.device);
  }
}

}  // namespace
}  // namespace umem

int main() {
  using namespace umem;
  RUN(a_new_segment);
  RUN(memory_that_goes_back);
  RUN(a_release_listener);
  RUN(system_memory);
  RUN(the_memory_of_the_card_is_asked_for);
  RUN(advice_anew);
  RUN(spilled_blocks_that_return);
  RUN(a_retry);
  RUN(peers);
  RUN(the_work_of_other_streams);
  RUN(events_of_other_streams);
  RUN(a_capture_begins_behind_the_events);
  RUN(events_behind_a_capture);
  RUN(mapped_handles);
  RUN(handles_without_a_place);
  RUN(a_pause);
  RUN(a_pause_of_managed_memory);
  RUN(an_allocation_during_a_resume_waits);
  RUN(a_limit_that_two_devices_would_exceed);
  RUN(a_limit_after_a_refusal);
  RUN(a_budget_that_two_threads_would_exceed);
  RUN(two_threads_ask_for_the_same);
  RUN(free_memory_beside_new_handles_is_taken);
  RUN(a_source_that_throws);
  RUN(everything_else_in_between);
}
