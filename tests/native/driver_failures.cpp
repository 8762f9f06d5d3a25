// Each call of the allocator's drivers fails once, at each of its places in a program that makes
// them all.
//
// An operation that has failed changes nothing that can be seen: it succeeds when it is repeated.
// In the end the statistics agree and nothing leaks (the fakes see to that). Of one thread, which
// ThreadSanitizer has nothing to see in: chaos.cpp has the same of the hint engine.
#include "steps.hpp"

namespace umem {
namespace {

constexpr StreamId kGraph = 9;
constexpr int kDevices = 2;
constexpr std::size_t kUsedBeside = 24 * MiB;

MachineSettings settings() {
  Config config = budget_config(200 * MiB);
  const auto of_class = [&](TensorClass it) -> ClassSetting& {
    return config.classes[static_cast<std::size_t>(it)];
  };
  of_class(TensorClass::weights) = {.kind = MemoryKind::managed};
  of_class(TensorClass::frozen_weights) = {
      .kind = MemoryKind::managed,
      .advice = {.placement = Placement::host, .accessed_by_device = true, .read_mostly = true}};
  of_class(TensorClass::optimizer_state) = {.kind = MemoryKind::pinned};
  return {.config = config, .devices = kDevices, .virtual_memory = true};
}

class Program {
 public:
  Machine machine{settings()};
  std::int64_t out_of_memory = 0;

  void run() {
    allocate(30 * MiB, TensorClass::weights);
    allocate(6 * MiB, TensorClass::frozen_weights);
    allocate(24 * MiB, TensorClass::optimizer_state);
    for (const std::size_t bytes : {512 * KiB, 100 * KiB, std::size_t{700}})
      for (std::size_t number = 0; number < kClasses; ++number)
        allocate(bytes, static_cast<TensorClass>(number));
    allocate(4 * MiB, TensorClass::activations, 1);  // the other GPU becomes a peer
    for (int step = 0; step < 2; ++step) {
      const std::uintptr_t first = allocate(40 * MiB), second = allocate(kUsedBeside);
      free(first);
      allocate(8 * MiB);
      used_beside(second);
      in_holes();
      allocate(150 * MiB);  // more than the budget
      machine.device.unspill();
      in_a_graph();
      attempt([&] { machine.device.pause(kHost); });
      attempt([&] { machine.device.resume(); });
      machine.device.set_device_budget(60 * MiB);
      allocate(90 * MiB, TensorClass::weights);
      machine.device.set_device_budget(200 * MiB);
      machine.driver.finish(kSide);
      machine.allocator.empty_cache();
    }
  }

  void check() {
    std::size_t found = 0;
    for (int number = 0; number < kDevices; ++number) {
      const DeviceAllocator& device = machine.allocator.device(number);
      check_consistent(device);
      for (const ClassStats& of : device.stats().by_class)
        found += static_cast<std::size_t>(of.requested_bytes.current);
    }
    CHECK_EQUAL(found, live_bytes_);
    CHECK_EQUAL(machine.allocator.device(0).stats().num_ooms +
                    machine.allocator.device(1).stats().num_ooms,
                out_of_memory);
  }

  void end() {
    while (!live_.empty()) free(live_.begin()->first);
    machine.driver.finish(kSide);
    machine.driver.finish(kMain);
    machine.allocator.empty_cache();
    check();
    CHECK_EQUAL(machine.driver.events(), 0U);
    std::size_t pending = 0;
    for (int number = 0; number < kDevices; ++number) {
      const TieredStat active = machine.allocator.device(number).stats().active_bytes;
      pending += static_cast<std::size_t>(active.all.current);
    }
    // Without an event nobody knows when another stream is done with a block: it is never reused.
    CHECK(pending == 0 || pending == kUsedBeside);
    if (pending != 0) return;
    for (int number = 0; number < kDevices; ++number)
      CHECK_EQUAL(machine.allocator.device(number).stats().reserved_bytes.all.current, 0);
    CHECK_EQUAL(machine.source.held_bytes(), 0U);
    CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  }

 private:
  template <class Operation>
  void attempt(Operation operation) {
    try {
      operation();
      return;
    } catch (const OutOfMemory&) {
      ++out_of_memory;
    } catch (const std::runtime_error&) {
    }
    if (!machine.device.is_paused()) check();  // no segment has memory meanwhile
    operation();
  }

  std::uintptr_t allocate(std::size_t bytes, TensorClass tensor_class = TensorClass::activations,
                          int device = 0, StreamId stream = kMain) {
    std::uintptr_t address = 0;
    attempt([&] {
      void* block = machine.allocator.device(device).allocate(bytes, stream, tensor_class);
      address = reinterpret_cast<std::uintptr_t>(block);
    });
    CHECK(live_.emplace(address, std::pair{device, bytes}).second);
    live_bytes_ += bytes;
    return address;
  }

  void free(std::uintptr_t address) {
    const auto [device, bytes] = live_.at(address);
    live_.erase(address);
    live_bytes_ -= bytes;
    CHECK(machine.allocator.device(device).free(address));
  }

  // Freed while another stream still uses it.
  void used_beside(std::uintptr_t address) {
    machine.driver.launch(kSide);
    CHECK(machine.allocator.record_stream(address, kSide));
    free(address);
  }

  void in_a_graph() {
    machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kGraph; });
    const std::uintptr_t block = allocate(4 * MiB, TensorClass::activations, 0, kGraph);
    machine.device.end_pool(kPool);
    free(block);
    machine.device.release_pool(kPool);
  }

  // Within a budget that is spent, a tensor lies in the holes that others have left.
  void in_holes() {
    machine.allocator.empty_cache();
    std::vector<std::uintptr_t> blocks;
    for (int i = 0; i < 5; ++i) blocks.push_back(allocate(6 * MiB));
    for (const std::size_t i : {1, 3}) free(blocks[i]);
    machine.device.set_device_budget(budget_bytes(machine));
    for (int i = 0; i < 2; ++i) {
      free(allocate(12 * MiB));
      blocks[1] = allocate(6 * MiB);  // ends it
      free(blocks[1]);
    }
    for (const std::size_t i : {0, 2, 4}) free(blocks[i]);
    machine.device.set_device_budget(200 * MiB);
  }

  std::map<std::uintptr_t, std::pair<int, std::size_t>> live_;  // device and bytes
  std::size_t live_bytes_ = 0;
};

TEST(each_call_of_the_allocator_fails_once) {
  std::int64_t calls = 0, raised = 0;
  for (const bool throws : {false, true})
    for (std::int64_t number = -1; number < calls; ++number) {
      Program program;
      program.machine.faults->fail_at(number, throws);
      program.run();
      if (number < 0) calls = program.machine.faults->calls();
      program.check();
      raised += program.out_of_memory;
      program.machine.faults->fail_at(-1);
      program.end();
    }
  CHECK(calls > 100);
  CHECK(raised > 0);
  std::printf("calls of the allocator's drivers, each failed in two ways: %lld\n",
              static_cast<long long>(calls));
}

}  // namespace
}  // namespace umem
