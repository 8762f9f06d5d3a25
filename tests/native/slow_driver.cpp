// While a call of the driver takes long, other threads use the cache, free, and read statistics.
// The slow call returns when they are done, so a test hangs where they have to wait for it.
#include <atomic>
#include <chrono>
#include <thread>

#include "steps.hpp"

namespace umem {
namespace {

constexpr Advice kOnDevice{.placement = Placement::device, .accessed_by_device = true};

// A machine with cached blocks of 1 MiB, and live ones that another thread may free.
class Busy : public Machine {
 public:
  explicit Busy(const MachineSettings& settings) : Machine(settings) {
    std::vector<std::uintptr_t> cached;
    for (int i = 0; i < 8; ++i) {
      cached.push_back(allocate(MiB));
      live_.push_back(allocate(MiB));
    }
    for (const std::uintptr_t address : cached) free(address);
  }

  // Another thread works during the call of this name, which `act` makes. `cache_stays`: there is
  // cached memory then.
  template <class Act>
  void expect_others_work(SlowCalls& calls, const char* name, Act act, bool cache_stays = true) {
    bool worked = false;
    calls.during(name, [&] {
      std::thread([&] {
        if (cache_stays) free(allocate(MiB));
        device.record_stream(live_.back(), 7);
        driver.finish(7);
        device.retag(live_.back(), TensorClass::weights);
        free(live_.back());
        live_.pop_back();
        if (cache_stays) check_consistent(device);
      }).join();
      worked = true;
    });
    act();
    CHECK(worked);
    check_consistent(device);
  }

 private:
  std::vector<std::uintptr_t> live_;
};

TEST(a_new_segment) {
  Busy machine({.config = config_of(MemoryKind::managed, kOnDevice)});
  const auto grow = [&] { machine.allocate(100 * MiB); };
  machine.expect_others_work(machine.source.slow, "allocate", grow);
  machine.expect_others_work(machine.driver.slow, "advise", grow);
  machine.expect_others_work(machine.driver.slow, "populate", grow);
}

TEST(memory_that_goes_back) {
  Busy machine({.config = config_of(MemoryKind::managed)});
  const auto give_back = [&] {
    machine.free(machine.allocate(100 * MiB));
    machine.device.empty_cache();
  };
  machine.expect_others_work(machine.source.slow, "deallocate", give_back, false);
  CHECK_EQUAL(machine.source.held_bytes(), machine.device.segments().front().bytes *
                                                    machine.device.segments().size());
}

TEST(a_release_listener) {
  struct Listener final : ReleaseListener {
    void before_release(std::span<const Range> ranges) noexcept override {
      for (const Range& range : ranges) bytes += range.bytes;
      calls.enter("before_release");
    }
    SlowCalls calls;
    std::size_t bytes = 0;
  };
  const auto listener = std::make_shared<Listener>();
  Busy machine({.config = config_of(MemoryKind::managed)});
  machine.device.set_release_listener(listener);
  machine.expect_others_work(
      listener->calls, "before_release",
      [&] {
        machine.free(machine.allocate(100 * MiB));
        machine.device.empty_cache();
      },
      false);
  CHECK(listener->bytes >= 100 * MiB);
}

// Ordinary memory goes back behind the work of its stream.
TEST(system_memory) {
  Config config = config_of(MemoryKind::system, kOnDevice);
  config.system_headroom_bytes = GiB;
  Busy machine({.config = config});
  const auto grow_and_give_back = [&] {
    machine.free(machine.allocate(100 * MiB));
    machine.device.empty_cache();
  };
  for (const char* name : {"memory", "advise"})
    machine.expect_others_work(machine.driver.slow, name, grow_and_give_back);
  machine.expect_others_work(machine.driver.slow, "wait", grow_and_give_back, false);
}

TEST(the_memory_of_the_card_is_asked_for) {
  Busy machine({.config = config_of(MemoryKind::managed)});
  machine.device.set_memory_fraction(0.5);
  machine.expect_others_work(machine.driver.slow, "memory",
                          [&] { machine.allocate(100 * MiB); });
  machine.device.set_memory_fraction(1e-3);
  SlowCalls& calls = machine.driver.slow;
  machine.expect_others_work(
      calls, "memory",
      [&] { CHECK_THROWS(OutOfMemory, machine.allocate(100 * MiB)); }, false);
}

// A block that passes to a class with other advice, and a cached one that carries other advice.
TEST(advice_anew) {
  Config config = config_of(MemoryKind::managed, kOnDevice);
  setting_of(config, TensorClass::weights).advice.read_mostly = true;
  Busy machine({.config = config});
  const std::uintptr_t address = machine.allocate(20 * MiB);
  machine.expect_others_work(machine.driver.slow, "advise",
                          [&] { machine.device.retag(address, TensorClass::weights); });
  machine.free(address);
  machine.expect_others_work(machine.driver.slow, "advise", [&] { machine.allocate(20 * MiB); });
}

// One of the spilled blocks is freed while another is advised.
TEST(spilled_blocks_that_return) {
  Config config = budget_config(20 * MiB, MemoryKind::managed);
  Machine machine({.config = config});
  machine.allocate(20 * MiB);
  const std::uintptr_t first = machine.allocate(20 * MiB), second = machine.allocate(20 * MiB);
  machine.driver.slow.during("advise", [&] {
    std::thread([&] {
      machine.free(first, second);
    }).join();
  });
  CHECK_EQUAL(machine.device.unspill().size(), 1U);
  CHECK_EQUAL(budget_bytes(machine), 20 * MiB);
  const std::size_t advised = machine.driver.advice().size();
  machine.allocate(20 * MiB);
  machine.allocate(20 * MiB);
  CHECK_EQUAL(machine.driver.advice().size(), advised + 1);  // only one carries other advice
}

// A source that is full gets the cache back, and is asked once more.
TEST(a_retry) {
  Busy machine({.config = config_of(MemoryKind::managed), .capacity_bytes = 140 * MiB});
  for (const char* name : {"allocate", "deallocate"}) {
    machine.free(machine.allocate(60 * MiB, 1));
    std::uintptr_t address = 0;
    machine.expect_others_work(
        machine.source.slow, name, [&] { address = machine.allocate(100 * MiB); },
        false);
    machine.free(address);
    machine.device.empty_cache();
  }
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 2);
}

TEST(peers) {
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

TEST(the_work_of_other_streams) {
  Busy machine({.config = config_of(MemoryKind::managed)});
  const std::uintptr_t address = machine.allocate(100 * MiB);
  machine.driver.launch(9);
  machine.free_used(address, 9);
  machine.expect_others_work(machine.driver.slow, "wait",
                          [&] { machine.device.empty_cache(); });
}

// A stream whose queue is full keeps the thread that frees, and no other one.
TEST(events_of_other_streams) {
  Busy machine({.config = config_of(MemoryKind::managed)});
  const std::uintptr_t address = machine.allocate(20 * MiB);
  machine.driver.launch(9);
  machine.device.record_stream(address, 9);
  machine.expect_others_work(machine.driver.slow, "record", [&] { machine.free(address); });
  CHECK(machine.allocate(20 * MiB) != address);
  machine.driver.finish(9);
  CHECK_EQUAL(machine.allocate(20 * MiB), address);
}

// The event would be a node of the graph, never to be queried.
TEST(a_capture_begins_behind_the_events) {
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
}

TEST(events_behind_a_capture) {
  Busy machine({.config = config_of(MemoryKind::managed)});
  const std::uintptr_t address = machine.allocate(20 * MiB);
  machine.device.record_stream(address, 9);
  machine.device.begin_pool({0, 1}, [](StreamId) { return false; });
  machine.driver.begin_capture(9);
  machine.free(address);
  machine.driver.end_capture(9);
  machine.expect_others_work(machine.driver.slow, "record",
                          [&] { machine.device.end_pool({0, 1}); });
  CHECK_EQUAL(machine.allocate(20 * MiB), address);
}

TEST(mapped_handles) {
  Busy machine({.config = config_of(MemoryKind::device), .virtual_memory = true});
  SlowCalls& calls = mapped(machine).slow;
  std::uintptr_t large = 0;
  for (const char* name : {"reserve", "create", "map"})
    machine.expect_others_work(calls, name, [&] { large = machine.allocate(100 * MiB); });
  machine.free(large);
  for (const char* name : {"unmap", "release"}) {
    machine.expect_others_work(calls, name, [&] { machine.device.empty_cache(); }, false);
    machine.free(machine.allocate(100 * MiB));
  }
}

// Handles that were to move, and that a limit leaves without a place.
TEST(handles_without_a_place) {
  Busy machine({.config = budget_config(100 * MiB), .virtual_memory = true});
  machine.free(machine.allocate(64 * MiB, 1));
  machine.device.set_memory_fraction(1e-3);
  machine.expect_others_work(mapped(machine).slow, "release", [&] {
    CHECK_THROWS(OutOfMemory, machine.allocate(80 * MiB));
  });
}

// Frees go on; allocations wait, because the cache is about to lose its memory.
TEST(a_pause) {
  Busy machine({.config = config_of(MemoryKind::device), .virtual_memory = true});
  const auto pause = [&] {
    machine.device.pause(64 * GiB);
    machine.device.resume();
  };
  for (const char* name : {"synchronize", "copy"})
    machine.expect_others_work(machine.driver.slow, name, pause, false);
  for (const char* name : {"unmap", "map"})
    machine.expect_others_work(mapped(machine).slow, name, pause, false);
  for (const char* name : {"allocate", "deallocate"})
    machine.expect_others_work(machine.source.slow, name, pause, false);
}

TEST(a_pause_of_managed_memory) {
  Busy machine({.config = config_of(MemoryKind::managed, kOnDevice)});
  for (const char* name : {"memory", "evict", "populate"})
    machine.expect_others_work(
        machine.driver.slow, name,
        [&] {
          machine.device.pause(64 * GiB);
          machine.device.resume();
        },
        false);
}

TEST(an_allocation_during_a_resume_waits) {
  Busy machine({.config = config_of(MemoryKind::device), .virtual_memory = true});
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
TEST(a_limit_that_two_devices_would_exceed) {
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
TEST(a_limit_after_a_refusal) {
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
  }
}

// One device: the second request waits for the first, and takes what that leaves.
TEST(a_budget_that_two_threads_would_exceed) {
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
  }
}

// A request that finds the first one's block when its turn comes takes that.
TEST(two_threads_ask_for_the_same) {
  Machine machine({.config = config_of(MemoryKind::managed)});
  std::thread other;
  machine.source.slow.during("allocate", [&] {
    other = std::thread([&] { machine.free(machine.allocate(60 * MiB)); });
  });
  machine.free(machine.allocate(60 * MiB));
  other.join();
  CHECK(machine.device.segments().size() <= 2);
}

// The handles are as many as were missing beside free memory, which another thread takes.
TEST(free_memory_beside_new_handles_is_taken) {
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
  machine.free(address, taken);
}

TEST(a_source_that_throws) {
  Busy machine({.config = config_of(MemoryKind::managed)});
  machine.source.set_throws(true);
  machine.expect_others_work(machine.source.slow, "allocate", [&] {
    CHECK_THROWS(std::runtime_error, machine.allocate(100 * MiB));
  });
  machine.source.set_throws(false);
  machine.allocate(100 * MiB);
  check_consistent(machine.device);
}

// What else changes the device's memory waits for its turn, a fork and a capture included.
TEST(everything_else_in_between) {
  Busy machine({.config = config_of(MemoryKind::managed)});
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
  }
}

}  // namespace
}  // namespace umem
