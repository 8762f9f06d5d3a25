// The device budget: what segments take on the card, who gives way, and what goes to the host.
#include <random>

#include "steps.hpp"

namespace umem {
namespace {

std::size_t on_device(const Machine& machine) {
  return machine.source.held_bytes(MemoryKind::device);
}

TEST(device_memory_beyond_the_budget_is_page_locked) {
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::system}) {
    Machine machine({.config = budget_config(32 * MiB, kind)});
    machine.allocate(30 * MiB);
    const std::uintptr_t spilled = machine.allocate(10 * MiB);
    CHECK_EQUAL(machine.source.held_bytes(kind), 30 * MiB);
    CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 10 * MiB);
    CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 10 * MiB);
    CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 10 * MiB);
    CHECK_EQUAL(budget_bytes(machine), 30 * MiB);
    CHECK(machine.allocator.live_blocks().back().kind == MemoryKind::pinned ||
          machine.allocator.live_blocks().front().kind == MemoryKind::pinned);

    machine.free(spilled);
    CHECK_EQUAL(machine.allocate(10 * MiB), spilled);  // host room is kept for the next step
    machine.free(spilled);
    machine.device.empty_cache();
    CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  }
}

// A class that the policy keeps in page-locked memory is not spilled, and the budget ignores it.
TEST(pinned_classes_are_outside_the_budget) {
  Machine machine({.config = budget_config(8 * MiB, MemoryKind::pinned)});
  machine.allocate(30 * MiB);
  CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 30 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  CHECK_EQUAL(budget_bytes(machine), 0U);
}

TEST(small_tensors_count) {
  Config config = budget_config(4 * MiB, MemoryKind::pinned);
  for (ClassSetting& setting : config.classes) setting.min_bytes = MiB;
  Machine machine({.config = config});
  for (int i = 0; i < 4; ++i) machine.allocate(700 * KiB);
  CHECK_EQUAL(on_device(machine), 4 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 4 * MiB);
  machine.allocate(700 * KiB);
  CHECK_EQUAL(on_device(machine), 4 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 2 * MiB);
}

// Whichever stream, class and kind it served.
TEST(the_cache_of_all_heaps_gives_way) {
  Config config = budget_config(40 * MiB);
  setting_of(config, TensorClass::weights).kind = MemoryKind::managed;
  Machine machine({.config = config});
  machine.free(machine.allocate(16 * MiB, kSide));
  machine.free(machine.allocate(12 * MiB, kMain, TensorClass::weights));
  machine.free(machine.allocate(100));
  CHECK_EQUAL(budget_bytes(machine), 30 * MiB);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(on_device(machine), 40 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(), 40 * MiB);
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 0);
  machine.allocate(2 * MiB, kMain, TensorClass::weights);
  CHECK_EQUAL(machine.device.kind_stats()[0].spilled_bytes, 20 * MiB);
}

// Only as much as is needed, and nothing where that does not suffice.
TEST(no_more_is_given_back_than_helps) {
  Machine machine({.config = budget_config(64 * MiB)});
  const std::uintptr_t small = machine.allocate(12 * MiB, kSide);
  const std::uintptr_t large = machine.allocate(40 * MiB, kSide);
  machine.free(small, large);
  machine.allocate(24 * MiB);
  CHECK_EQUAL(machine.device.stats().num_device_free, 1);
  CHECK_EQUAL(on_device(machine), 64 * MiB);
  machine.allocate(60 * MiB);
  CHECK_EQUAL(machine.device.stats().num_device_free, 1);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 60 * MiB);
  CHECK_EQUAL(machine.allocate(40 * MiB, kSide), large);
}

TEST(pending_events_are_finished_if_that_helps) {
  Machine machine({.config = budget_config(40 * MiB)});
  const std::uintptr_t pending = machine.allocate(20 * MiB, kSide);
  machine.driver.launch(kMain);
  machine.free_used(pending, kMain);
  machine.allocate(60 * MiB);  // waiting would not help
  CHECK_EQUAL(machine.driver.events(), 1U);
  machine.allocate(30 * MiB);
  CHECK_EQUAL(machine.driver.events(), 0U);
  CHECK_EQUAL(on_device(machine), 30 * MiB);
}

TEST(a_pending_block_of_the_heap_is_used) {
  Machine machine({.config = budget_config(40 * MiB)});
  const std::uintptr_t pending = machine.allocate(30 * MiB);
  machine.driver.launch(kSide);
  machine.free_used(pending, kSide);
  CHECK_EQUAL(machine.allocate(24 * MiB), pending);
  CHECK_EQUAL(machine.device.stats().num_device_alloc, 1);
}

TEST(memory_of_graphs_stays) {
  Machine machine({.config = budget_config(40 * MiB)});
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  const std::uintptr_t scratch = machine.allocate(30 * MiB, kCapture);
  machine.free(scratch);
  machine.allocate(20 * MiB);  // nothing is given back while a capture may run
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 20 * MiB);
  machine.device.end_pool(kPool);
  machine.allocate(30 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 50 * MiB);
  CHECK(machine.source.holds(scratch, 30 * MiB));

  machine.device.release_pool(kPool);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(on_device(machine), 40 * MiB);
  CHECK(machine.device.pool_stats().empty());
}

TEST(requests_return_to_the_device) {
  Machine machine({.config = budget_config(32 * MiB)});
  const std::uintptr_t first = machine.allocate(30 * MiB);
  const std::uintptr_t spilled = machine.allocate(30 * MiB);
  machine.free(first, spilled);
  CHECK_EQUAL(machine.allocate(30 * MiB), first);
  machine.free(first);
  machine.allocate(32 * MiB);  // the host's 30 MiB are cached all the while
  CHECK_EQUAL(on_device(machine), 32 * MiB);
}

// A class at home in page-locked memory, and others on the device.
Config config_with_homes(std::size_t budget) {
  Config config = budget_config(budget);
  setting_of(config, TensorClass::optimizer_state).kind = MemoryKind::pinned;
  return config;
}

// Weights that were loaded beyond the budget are exchanged for others: page-locking takes longer than
// copying.
TEST(spilled_memory_serves_page_locked_classes_when_it_is_free) {
  Machine machine({.config = config_with_homes(32 * MiB)});
  machine.allocate(30 * MiB);
  const std::uintptr_t spilled = machine.allocate(20 * MiB);
  const std::uintptr_t home = machine.allocate(10 * MiB, kMain, TensorClass::optimizer_state);
  CHECK(home != spilled);
  CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 30 * MiB);

  machine.free(spilled);
  machine.allocate(10 * MiB, kSide, TensorClass::optimizer_state);  // its work does not wait
  CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 40 * MiB);
  CHECK_EQUAL(machine.allocate(12 * MiB, kMain, TensorClass::optimizer_state), spilled);
  CHECK_EQUAL(machine.allocate(8 * MiB, kMain, TensorClass::optimizer_state), spilled + 12 * MiB);
  CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 40 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 20 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 30 * MiB);

  machine.free(spilled);
  machine.free(spilled + 12 * MiB);
  machine.device.empty_cache();
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
}

TEST(page_tables_of_page_locked_memory_count) {
  Machine machine({.config = config_with_homes(40 * MiB)});
  const auto page_lock = [&](std::size_t bytes) {
    return machine.allocate(bytes, kMain, TensorClass::optimizer_state);
  };
  machine.free(machine.allocate(30 * MiB));
  const std::uintptr_t home = page_lock(10 * GiB);
  CHECK_EQUAL(on_device(machine), 0U);  // the cache made room at once
  CHECK_EQUAL(budget_bytes(machine), 20 * MiB);
  machine.allocate(20 * MiB);
  machine.allocate(2 * MiB);
  CHECK_EQUAL(on_device(machine), 20 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 20 * MiB);
  machine.free(home);
  CHECK_EQUAL(budget_bytes(machine), 40 * MiB);  // it is cached
  machine.device.empty_cache();
  CHECK_EQUAL(budget_bytes(machine), 20 * MiB);
  page_lock(GiB - 22 * MiB);  // with what was spilled, no whole GiB
  CHECK_EQUAL(budget_bytes(machine), 20 * MiB);
  CHECK_EQUAL(machine.device.stats().budget_bytes.peak, static_cast<std::int64_t>(40 * MiB));
}

TEST(page_tables_of_others_count) {
  Machine machine({.config = config_with_homes(40 * MiB)});
  machine.device.count_page_locked(3 * GiB);
  CHECK_EQUAL(budget_bytes(machine), 6 * MiB);
  const std::uintptr_t home = machine.allocate(2 * GiB, kMain, TensorClass::optimizer_state);
  CHECK_EQUAL(budget_bytes(machine), 10 * MiB);
  machine.device.count_page_locked(-static_cast<std::ptrdiff_t>(3 * GiB));
  CHECK_EQUAL(budget_bytes(machine), 4 * MiB);
  machine.free(home);
  machine.device.empty_cache();
  CHECK_EQUAL(budget_bytes(machine), 0U);
}

TEST(a_class_may_have_room_on_the_device) {
  Machine machine({.config = config_with_homes(64 * MiB)});
  const auto allocate = [&](std::size_t bytes) {
    machine.allocate(bytes, kMain, TensorClass::optimizer_state);
    return on_device(machine);
  };
  const auto give = [&](std::size_t bytes) {
    return machine.device.set_device_room(TensorClass::optimizer_state, bytes);
  };
  CHECK_EQUAL(give(30 * MiB), 0U);
  CHECK_EQUAL(allocate(20 * MiB), 20 * MiB);
  CHECK_EQUAL(allocate(20 * MiB), 20 * MiB);  // it has no room
  CHECK_EQUAL(allocate(4 * MiB), 20 * MiB);   // and those behind it have none
  CHECK_EQUAL(give(12 * MiB), 0U);
  CHECK_EQUAL(allocate(10 * MiB), 30 * MiB);
  CHECK_EQUAL(give(0), 2 * MiB);
  CHECK_EQUAL(allocate(2 * MiB), 30 * MiB);
  const auto number = number_of(TensorClass::optimizer_state);
  CHECK_EQUAL(machine.device.stats().by_class.at(number).allocated_bytes.current,
              static_cast<std::int64_t>(56 * MiB));
}

TEST(a_smaller_budget_takes_the_cache_back) {
  Machine machine({.config = budget_config(0)});
  const std::uintptr_t kept = machine.allocate(10 * MiB);
  const std::uintptr_t pending = machine.allocate(20 * MiB);
  machine.driver.launch(kSide);
  machine.device.record_stream(pending, kSide);
  machine.free(machine.allocate(40 * MiB));
  machine.free(pending);
  machine.device.set_device_budget(30 * MiB);
  CHECK_EQUAL(on_device(machine), 30 * MiB);
  machine.device.set_device_budget(4 * MiB);
  CHECK_EQUAL(on_device(machine), 10 * MiB);
  machine.free(kept);
}

// A device that others use too may be full before the budget is spent.
TEST(a_full_device_is_as_a_spent_budget) {
  Machine machine({.config = budget_config(64 * MiB)});
  machine.source.set_capacity(MemoryKind::device, 20 * MiB);
  machine.allocate(20 * MiB);
  machine.allocate(12 * MiB);
  CHECK_EQUAL(on_device(machine), 20 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 12 * MiB);
  machine.device.set_device_budget(0);
  CHECK(contains(out_of_memory_text(machine, 30 * MiB), "The memory resource has no more"));
}

TEST(alignment_counts) {
  Machine machine({.config = budget_config(33 * MiB), .offset_bytes = 256});
  machine.allocate(30 * MiB);
  CHECK_EQUAL(on_device(machine), 32 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 32 * MiB);
  Machine tight({.config = budget_config(31 * MiB), .offset_bytes = 256});
  tight.allocate(30 * MiB);
  CHECK_EQUAL(on_device(tight), 0U);
  CHECK_EQUAL(pinned_stats(tight).spilled_bytes, 30 * MiB);
}

TEST(the_error_says_what_holds_the_budget) {
  Config config = config_with_homes(64 * MiB);
  config.pinned_limit_bytes = 2 * GiB + 16 * MiB;
  Machine machine({.config = config});
  machine.allocate(30 * MiB, kMain, TensorClass::weights);
  machine.allocate(20 * MiB, kMain, TensorClass::gradients);
  machine.allocate(2 * GiB, kMain, TensorClass::optimizer_state);
  machine.allocate(12 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 12 * MiB);
  const std::string text = out_of_memory_text(machine, 12 * MiB);
  CHECK(text.starts_with("CUDA out of memory."));
  CHECK(contains(text, "device budget, 64.00 MiB"));
  CHECK(contains(text, "weights 30.00 MiB, gradients 20.00 MiB, cached 0 B"));
  CHECK(contains(text, "page tables of page-locked memory 4.00 MiB"));
  CHECK(contains(text, "limit on page-locked host memory, 2.02 GiB, holds 2.01 GiB"));
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::pinned), 2 * GiB + 12 * MiB);

  machine.source.set_capacity(machine.source.held_bytes());
  const std::string refused = out_of_memory_text(machine, 11 * MiB);
  CHECK(contains(refused, "device budget, 64.00 MiB"));
}

TEST(the_pinned_limit_counts_all_devices) {
  Config config = config_of(MemoryKind::pinned);
  config.pinned_limit_bytes = 64 * MiB;
  Machine machine({.config = config, .devices = 2});
  machine.allocate(30 * MiB);
  const std::uintptr_t cached = machine.allocate_on(1, 30 * MiB);
  CHECK(contains(out_of_memory_text(machine, 12 * MiB), "64.00 MiB, holds 60.00 MiB"));
  CHECK(machine.allocator.device(1).free(cached));
  CHECK(machine.allocator.allocate(12 * MiB, 0, kMain) != nullptr);
  CHECK_EQUAL(machine.source.held_bytes(), 60 * MiB);  // as much again as was in use
}

TEST(the_pinned_limit_moves_with_what_is_held) {
  Config config = config_of(MemoryKind::pinned);
  config.pinned_limit_bytes = 64 * MiB;
  Machine machine({.config = config});
  machine.allocate(30 * MiB);
  machine.allocator.set_pinned_room(16 * MiB);
  CHECK_EQUAL(machine.allocator.pinned_room_bytes(), 16 * MiB);
  CHECK(contains(out_of_memory_text(machine, 20 * MiB), "46.00 MiB, holds 30.00 MiB"));
  machine.allocate(16 * MiB);
  machine.allocator.set_pinned_room(0);
  CHECK_EQUAL(machine.allocator.pinned_room_bytes(), 0U);
  CHECK(contains(out_of_memory_text(machine, 2 * MiB), "46.00 MiB, holds 46.00 MiB"));
}

// ---- a step that repeats ----

// Segments are allocated and freed in the first few steps only, and the budget holds all the time.
void check_settles(Machine& machine, const Step& step, std::size_t budget, int first_few = 4) {
  constexpr int kSteps = 20;
  DeviceStats settled;
  for (int i = 0; i < kSteps; ++i) {
    run_step(machine, step);
    if (i + 1 == first_few) settled = machine.device.stats();
  }
  const DeviceStats stats = machine.device.stats();
  CHECK_EQUAL(stats.num_device_alloc, settled.num_device_alloc);
  CHECK_EQUAL(stats.num_device_free, settled.num_device_free);
  CHECK_EQUAL(stats.num_alloc_retries, 0);
  CHECK(stats.budget_bytes.peak <= static_cast<std::int64_t>(budget));
}

TEST(a_step_that_fits_settles_on_the_device) {
  Machine machine({.config = budget_config(200 * MiB)});
  machine.allocate(60 * MiB, kMain, TensorClass::weights);
  std::vector<Request> blocks(12, {.bytes = 3 * MiB});
  const Step step = {blocks, {{.bytes = 30 * MiB}, {.bytes = 50 * MiB}, {.bytes = 4096}},
                     {{.bytes = 120 * MiB}}, blocks};
  check_settles(machine, step, 200 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
}

TEST(a_step_that_does_not_fit_settles_on_the_host) {
  Machine machine({.config = budget_config(100 * MiB)});
  const Step step = {{{.bytes = 60 * MiB}, {.bytes = 60 * MiB}, {.bytes = 30 * MiB}},
                     {{.bytes = 90 * MiB}, {.bytes = 700 * KiB}}};
  check_settles(machine, step, 100 * MiB);
  CHECK(pinned_stats(machine).spilled_bytes != 0);
}

// What one phase caches is in the way of the next one, and the other way round: the smaller
// requests end on the host, and the large one on the device.
TEST(heaps_do_not_take_segments_from_each_other_for_ever) {
  const std::vector<Request> small(40, {.bytes = 500 * KiB});
  const std::vector<Request> side = {{.bytes = 40 * MiB, .stream = kSide}};
  const std::vector<Request> managed = {
      {.bytes = 40 * MiB, .stream = kMain, .tensor_class = TensorClass::weights}};
  for (const std::vector<Request>& other : {small, side, managed}) {
    Config config = budget_config(100 * MiB);
    setting_of(config, TensorClass::weights).kind = MemoryKind::managed;
    Machine machine({.config = config});
    check_settles(machine, {other, {{.bytes = 92 * MiB}}}, 100 * MiB);
    CHECK(on_device(machine) >= 92 * MiB);
  }
}

// The same for streams whose segments have one size.
TEST(equal_heaps_do_not_take_segments_from_each_other_for_ever) {
  Machine machine({.config = budget_config(60 * MiB)});
  check_settles(machine, {{{.bytes = 40 * MiB}}, {{.bytes = 40 * MiB, .stream = kSide}}},
                60 * MiB);
}

// A heap that is used no more gives way in the end, however often its segments were missed before.
TEST(patience_ends) {
  Machine machine({.config = budget_config(60 * MiB)});
  const Step both = {{{.bytes = 40 * MiB}}, {{.bytes = 40 * MiB, .stream = kSide}}};
  for (int i = 0; i < 5; ++i) run_step(machine, both);
  const std::size_t spilled_bytes = pinned_stats(machine).spilled_bytes;
  CHECK_EQUAL(spilled_bytes, 40 * MiB);
  const auto on_host = [&](StreamId stream) {
    const std::uintptr_t address = machine.allocate(40 * MiB, stream);
    const MemoryKind kind = machine.allocator.live_blocks().at(0).kind;
    machine.free(address);
    return kind == MemoryKind::pinned;
  };
  const StreamId turned_away = on_host(kSide) ? kSide : kMain;
  int requests = 0;
  while (on_host(turned_away)) CHECK(++requests < 200000);
  CHECK(requests > 10000);  // many steps
}

TEST(a_training_settles_whatever_its_budget) {
  std::int64_t peak_bytes = 0;
  for (const double share : {0.0, 1.05, 1.02, 1.0, 0.95, 0.8}) {  // of the peak; 0: no budget
    const auto budget = static_cast<std::size_t>(share * static_cast<double>(peak_bytes));
    Machine machine({.config = budget_config(budget)});
    Llama model(machine);
    DeviceStats settled;
    for (int i = 0; i < 20; ++i) {
      model.step();
      if (i == 4) settled = machine.device.stats();
    }
    const DeviceStats stats = machine.device.stats();
    CHECK_EQUAL(stats.num_device_alloc, settled.num_device_alloc);
    CHECK_EQUAL(stats.num_device_free, settled.num_device_free);
    if (share == 0)
      peak_bytes = stats.allocated_bytes.all.peak;
    else  // what is spilled needs page tables, although nothing may leave for them
      CHECK(stats.budget_bytes.peak <=
            static_cast<std::int64_t>(budget + pinned_stats(machine).reserved_bytes / 512));
    if (share == 1.05) CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  }
}

TEST(random_steps_settle) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    Step step(6);
    for (std::vector<Request>& phase : step)
      for (std::size_t i = random() % 12 + 1; i > 0; --i)
        phase.push_back({.bytes = random() % 3 == 0 ? 1 + random() % (2 * MiB)
                                                    : 2 * MiB + random() % (30 * MiB),
                         .stream = random() % 4 == 0 ? kSide : kMain,
                         .tensor_class = static_cast<TensorClass>(random() % kClasses)});
    Config config = budget_config(160 * MiB);
    setting_of(config, TensorClass::weights).kind = MemoryKind::managed;
    Machine machine({.config = config});
    check_settles(machine, step, 160 * MiB, 10);
  }
}

}  // namespace
}  // namespace umem
