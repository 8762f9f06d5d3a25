// A paused device: what goes back, what stays, and that contents and addresses return.
#include <utility>

#include "core/host.hpp"
#include "steps.hpp"

namespace umem {
namespace {

template <class Call>
std::string pause_error(Call call) {
  try {
    call();
  } catch (const PauseError& error) {
    return error.what();
  }
  check::fail(__FILE__, __LINE__, "no PauseError");
}

std::size_t device_bytes(const Machine& machine) {
  return stats_of(machine, MemoryKind::device).reserved_bytes;
}

TEST(all_but_the_copy_goes_back) {
  Machine machine = machine_of(0);
  const std::uintptr_t first = machine.allocate(40 * MiB);
  const std::uintptr_t hole = machine.allocate(24 * MiB);
  const std::uintptr_t last = machine.allocate(20 * MiB);
  const std::uintptr_t small = machine.allocate(100, kSide);
  machine.free(hole);
  const DeviceStats before = machine.device.stats();
  const std::size_t held = mapped(machine).held_bytes();

  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  CHECK_EQUAL(report.returned_bytes, held);
  CHECK_EQUAL(report.kept_bytes, 0U);
  CHECK_EQUAL(report.evicted_bytes, 0U);
  CHECK_EQUAL(report.host_bytes, 60 * MiB + 512);
  CHECK_EQUAL(machine.driver.copied_bytes(), 60 * MiB + 512);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 60 * MiB + 512);
  CHECK(machine.device.is_paused());
  const DeviceStats paused = machine.device.stats();
  CHECK_EQUAL(paused.allocated_bytes.all.current, before.allocated_bytes.all.current);
  CHECK_EQUAL(paused.reserved_bytes.all.current, 0);
  CHECK_EQUAL(paused.budget_bytes.current, 0);
  CHECK_EQUAL(device_bytes(machine), 0U);

  machine.device.resume();
  CHECK(!machine.device.is_paused());
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 0U);
  CHECK_EQUAL(machine.driver.copied_bytes(), 2 * (60 * MiB + 512));
  CHECK(mapped(machine).holds(first, 40 * MiB));
  CHECK(mapped(machine).holds(last, 20 * MiB));
  CHECK(mapped(machine).holds(small, 512));
  CHECK(!mapped(machine).holds(hole, 24 * MiB));  // free memory does not come back
  CHECK_EQUAL(device_bytes(machine), mapped(machine).held_bytes());
  check_consistent(machine.device);
  CHECK_EQUAL(machine.allocate(24 * MiB), hole);
}

// Contents are exact, over boundaries of handles and of the copy's pieces, and with part of a run
// freed in the meantime.
TEST(contents_return) {
  auto source = std::make_unique<HostSource>(0);
  auto driver = std::make_unique<HostDriver>(4 * GiB, std::make_unique<HostVirtualMemory>(4 * GiB));
  Allocator allocator(config_of(MemoryKind::device), std::move(source), std::move(driver), 1);
  DeviceAllocator& device = allocator.device(0);
  const std::vector<std::size_t> sizes = {3 * MiB,   700,       20 * MiB, 5 * MiB + 64 * KiB,
                                          900 * KiB, 270 * MiB, 9 * MiB};
  std::vector<unsigned char*> tensors;
  const auto value = [](std::size_t tensor, std::size_t at) {
    return static_cast<unsigned char>(at * 31 + at / 4096 + tensor * 7);
  };
  // Few bytes of each page: the test compares what a lost or moved page would change.
  constexpr std::size_t kStep = 509;
  for (std::size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    tensors.push_back(static_cast<unsigned char*>(
        device.allocate(sizes[tensor], tensor % 2 * kSide, TensorClass::weights)));
    for (std::size_t at = 0; at < sizes[tensor]; at += kStep)
      tensors[tensor][at] = value(tensor, at);
  }
  const auto check_all = [&] {
    for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor)
      for (std::size_t at = 0; tensors[tensor] != nullptr && at < sizes[tensor]; at += kStep)
        CHECK(tensors[tensor][at] == value(tensor, at));
  };
  for (const std::size_t freed : {sizes.size(), std::size_t{2}, std::size_t{5}}) {
    device.pause(kHost);
    if (freed != sizes.size())
      CHECK(device.free(reinterpret_cast<std::uintptr_t>(std::exchange(tensors[freed], nullptr))));
    device.resume();
    check_all();
    check_consistent(device);
  }
}

// Work that is under way ends before its memory goes; what other streams still use is kept.
TEST(the_device_is_waited_for) {
  Machine machine = machine_of(0);
  const std::uintptr_t used = machine.allocate(16 * MiB);
  const std::uint64_t side_work = machine.driver.launch(kSide);
  const std::uint64_t work = machine.driver.launch(kMain);
  machine.free_used(used, kSide);
  mapped(machine).on_unmap([&] {
    CHECK(machine.driver.done(kMain) >= work && machine.driver.done(kSide) >= side_work);
  });
  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(report.returned_bytes, 16 * MiB);
  CHECK_EQUAL(report.host_bytes, 0U);
  CHECK_EQUAL(machine.driver.events(), 0U);
  machine.device.resume();
}

// What is freed while the device is paused neither comes back nor counts.
TEST(tensors_may_be_freed_meanwhile) {
  Machine machine = machine_of(0);
  const std::uintptr_t first = machine.allocate(40 * MiB);
  const std::uintptr_t kept = machine.allocate(20 * MiB);
  const std::uintptr_t last = machine.allocate(50 * MiB);
  const std::uintptr_t small = machine.allocate(100);
  machine.device.pause(kHost);
  machine.free(first);
  machine.device.empty_cache();
  machine.free(last);
  machine.free_used(small, kSide);
  CHECK_EQUAL(machine.device.stats().allocated_bytes.all.current, 20 * MiB);
  CHECK_EQUAL(machine.device.stats().reserved_bytes.all.current, 0);
  machine.device.resume();
  CHECK(mapped(machine).holds(kept, 20 * MiB));
  CHECK_EQUAL(mapped(machine).held_bytes(), round_up(20 * MiB, kHandle));
  CHECK_EQUAL(device_bytes(machine), mapped(machine).held_bytes());
  CHECK_EQUAL(budget_bytes(machine), mapped(machine).held_bytes());
  check_consistent(machine.device);
  CHECK_EQUAL(machine.allocate(40 * MiB), first);
}

TEST(nothing_is_allocated_meanwhile) {
  Config config = budget_config(0);
  setting_of(config, TensorClass::weights).kind = MemoryKind::managed;
  Machine machine({.config = config, .devices = 2, .virtual_memory = true});
  machine.free(machine.allocate(4 * MiB));
  machine.allocator.pause(0, kHost);
  for (const TensorClass tensor_class : {TensorClass::activations, TensorClass::weights}) {
    const auto allocate = [&] { machine.allocate(4 * MiB, kMain, tensor_class); };
    CHECK(contains(pause_error(allocate), "umem.resume()"));
  }
  CHECK(contains(pause_error([&] { machine.allocator.allocate(100, 0, kMain); }), "GPU 0"));
  CHECK_EQUAL(machine.device.stats().num_ooms, 0);
  CHECK(machine.allocate(0) == 0);  // needs no memory
  // Other devices go on, and their access to what is mapped later is kept.
  CHECK(machine.allocator.allocate(4 * MiB, 1, kMain) != nullptr);
  machine.device.resume();
  CHECK(machine.allocate(4 * MiB) != 0);
}

TEST(peers_that_came_meanwhile_have_access) {
  Machine machine({.config = budget_config(0), .devices = 2, .virtual_memory = true});
  const std::uintptr_t address = machine.allocate_on(0, 20 * MiB);
  machine.allocator.pause(0, kHost);
  machine.allocator.allocate(MiB, 1, kMain);
  machine.device.resume();
  CHECK(mapped(machine).holds(address, 20 * MiB, {1}));
}

TEST(calls_come_in_turns) {
  Machine machine = machine_of(0);
  CHECK(contains(pause_error([&] { machine.device.resume(); }), "not paused"));
  machine.device.pause(kHost);
  CHECK(contains(pause_error([&] { machine.device.pause(kHost); }), "paused already"));
  machine.device.resume();
  CHECK(contains(pause_error([&] { machine.device.resume(); }), "not paused"));
}

// A card whose memory others took: nothing is lost, and a later call succeeds.
TEST(without_room_it_stays_paused) {
  Machine machine = machine_of(0);
  const std::uintptr_t large = machine.allocate(40 * MiB);
  const std::uintptr_t small = machine.allocate(100);
  machine.device.pause(kHost);
  for (const std::size_t capacity : {kSmallHandle, 40 * MiB}) {
    mapped(machine).set_capacity(capacity);
    const std::string error = pause_error([&] { machine.device.resume(); });
    CHECK(contains(error, "42.00 MiB") && contains(error, "umem.resume() again"));
    CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
    CHECK(machine.device.is_paused());
    CHECK_EQUAL(machine.device.stats().reserved_bytes.all.current, 0);
  }
  mapped(machine).set_capacity(0);
  mapped(machine).refuse_maps(true);
  pause_error([&] { machine.device.resume(); });
  mapped(machine).refuse_maps(false);
  machine.driver.refuse_copies(true);
  pause_error([&] { machine.device.resume(); });
  machine.driver.refuse_copies(false);
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  machine.device.resume();
  CHECK(mapped(machine).holds(large, 40 * MiB) && mapped(machine).holds(small, 512));
}

// A host without memory, a capture, a failed copy: the device is not paused, and goes on.
TEST(a_pause_that_fails_changes_nothing) {
  Machine machine = machine_of(0);
  const std::uintptr_t tensor = machine.allocate(40 * MiB);
  const auto check_running = [&] {
    CHECK(!machine.device.is_paused());
    CHECK(mapped(machine).holds(tensor, 40 * MiB));
    CHECK_EQUAL(machine.source.held_bytes(), 0U);
    CHECK_EQUAL(budget_bytes(machine), 40 * MiB);
    machine.free(machine.allocate(4 * MiB));
    machine.device.empty_cache();
    check_consistent(machine.device);
  };
  const auto pause = [&] { machine.device.pause(kHost); };
  CHECK(contains(pause_error([&] { machine.device.pause(40 * MiB - 1); }), "40.00 MiB"));
  check_running();
  machine.driver.begin_capture(kCapture);
  pause_error(pause);
  machine.driver.end_capture(kCapture);
  check_running();
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  CHECK(contains(pause_error(pause), "captured"));
  machine.device.end_pool(kPool);
  machine.device.release_pool(kPool);
  check_running();
  machine.driver.refuse_copies(true);
  pause_error(pause);
  machine.driver.refuse_copies(false);
  check_running();
  machine.source.set_throws(true);
  CHECK_THROWS(std::runtime_error, machine.device.pause(kHost));
  machine.source.set_throws(false);
  check_running();
  machine.device.pause(40 * MiB);  // just enough
  machine.device.resume();
  check_running();
}

// Page-locked memory has a limit; beyond it the copy is pageable. Its page tables are on the card.
TEST(the_copy_is_page_locked_within_the_limit) {
  Config config = budget_config(0);
  config.pinned_limit_bytes = 2 * GiB;
  Machine machine({.config = config, .virtual_memory = true});
  machine.allocate(2 * GiB + 512 * MiB);
  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 2 * GiB);
  CHECK_EQUAL(report.host_bytes, 2 * GiB + 512 * MiB);
  CHECK_EQUAL(report.kept_bytes, 4 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 4 * MiB);
  machine.device.resume();
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK_EQUAL(budget_bytes(machine), 2 * GiB + 512 * MiB);
  machine.device.pause(kHost);  // the limit was given back
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 2 * GiB);
}

// A graph's memory keeps its place, so it stays on the card.
TEST(memory_of_graphs_is_kept) {
  Machine machine = machine_of(0);
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  const std::uintptr_t of_graph = machine.allocate(20 * MiB, kCapture);
  machine.device.end_pool(kPool);
  machine.allocate(16 * MiB);
  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(report.returned_bytes, 16 * MiB);
  CHECK_EQUAL(report.kept_bytes, 20 * MiB);
  CHECK(machine.source.holds(of_graph, 20 * MiB));
  machine.free(of_graph);
  machine.device.resume();
}

TEST(managed_memory_is_evicted_and_comes_back) {
  Config config = budget_config(0);
  setting_of(config, TensorClass::weights) = {
      .kind = MemoryKind::managed, .advice = {.placement = Placement::device}};
  setting_of(config, TensorClass::gradients) = {
      .kind = MemoryKind::managed, .advice = {.placement = Placement::host}};
  Machine machine({.config = config, .virtual_memory = true});
  const std::uintptr_t weights = machine.allocate(20 * MiB, kMain, TensorClass::weights);
  machine.allocate(24 * MiB, kMain, TensorClass::gradients);
  machine.allocate(8 * MiB);
  const std::size_t populated = machine.driver.populated().size();
  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(report.returned_bytes, 8 * MiB);
  CHECK_EQUAL(report.evicted_bytes, 44 * MiB);
  CHECK_EQUAL(report.kept_bytes, 0U);
  CHECK_EQUAL(machine.driver.evicted().size(), 2U);
  machine.device.resume();
  CHECK_EQUAL(machine.driver.populated().size(), populated + 1);
  CHECK_EQUAL(machine.driver.populated().back().address, weights);

  machine.driver.refuse_hints(true);
  const PauseReport refused = machine.device.pause(kHost);
  CHECK_EQUAL(refused.evicted_bytes, 0U);
  CHECK_EQUAL(refused.kept_bytes, 44 * MiB);
  machine.device.resume();
}

// Spilled memory is in host memory already, and is not counted again.
TEST(spilled_memory_stays_on_the_host) {
  Machine machine({.config = budget_config(20 * MiB, MemoryKind::managed)});
  machine.allocate(20 * MiB);
  machine.allocate(30 * MiB);
  const std::array<KindStats, kKinds> kinds = machine.device.kind_stats();
  CHECK_EQUAL(kinds[number_of(MemoryKind::managed)].spilled_bytes, 30 * MiB);
  const PauseReport report = machine.device.pause(25 * MiB);
  CHECK_EQUAL(report.evicted_bytes, 20 * MiB);
  CHECK_EQUAL(report.kept_bytes, 0U);
  machine.device.resume();

  machine.device.set_device_budget(60 * MiB);
  CHECK_EQUAL(machine.device.unspill().size(), 1U);
  CHECK_THROWS(PauseError, machine.device.pause(25 * MiB));
  CHECK_EQUAL(machine.device.pause(kHost).evicted_bytes, 50 * MiB);
  machine.device.resume();
}

// Without virtual memory management nothing can be given back, and the report says so.
TEST(plain_segments_are_kept) {
  Machine machine({.config = budget_config(0)});
  machine.allocate(20 * MiB);
  machine.free(machine.allocate(30 * MiB));
  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(report.returned_bytes, 30 * MiB);  // cached memory goes all the same
  CHECK_EQUAL(report.kept_bytes, 20 * MiB);
  CHECK_EQUAL(report.host_bytes, 0U);
  machine.device.resume();
}

// An allocator may end while paused: the fakes check that nothing is lost.
TEST(an_allocator_may_end_paused) {
  Machine machine = machine_of(0);
  machine.allocate(40 * MiB);
  machine.allocate(100);
  machine.device.pause(kHost);
}

}  // namespace
}  // namespace umem
