// Plain device memory of mapped handles: what it takes on the card, what moves, and what stays.
#include <random>
#include <thread>

#include "steps.hpp"

namespace umem {
namespace {

std::size_t runs(const Machine& machine) { return machine.device.segments().size(); }

// The statistics say to the byte what the card holds.
void check_exact(const Machine& machine) {
  check_consistent(machine.device);
  std::size_t bytes = 0;
  for (const SegmentSnapshot& segment : machine.device.segments()) {
    if (!segment.is_expandable) continue;
    bytes += segment.bytes;
    CHECK(segment.kind == MemoryKind::device);
    CHECK(mapped(machine).holds(segment.address, segment.bytes));
  }
  CHECK_EQUAL(mapped(machine).held_bytes(), bytes);
  CHECK_EQUAL(stats_of(machine, MemoryKind::device)
                  .reserved_bytes,
              bytes + machine.source.held_bytes(MemoryKind::device));
}

TEST(tensors_lie_in_one_run) {
  Machine machine = machine_of(0);
  const std::uintptr_t first = machine.allocate(20 * MiB);
  const std::uintptr_t second = machine.allocate(30 * MiB);
  const std::uintptr_t third = machine.allocate(3 * MiB);
  CHECK_EQUAL(second, first + 20 * MiB);
  CHECK_EQUAL(third, second + 30 * MiB);
  CHECK_EQUAL(runs(machine), 1U);
  CHECK_EQUAL(mapped(machine).held_bytes(), round_up(53 * MiB, kHandle));
  CHECK_EQUAL(machine.source.requests(), 0U);
  CHECK(machine.device.base_allocation(second)->address == first);
  check_exact(machine);

  // Together what they left serves a tensor that none of them would.
  machine.free(first, second);
  CHECK_EQUAL(machine.allocate(50 * MiB), first);
  CHECK_EQUAL(mapped(machine).held_bytes(), round_up(53 * MiB, kHandle));
  check_exact(machine);
}

TEST(small_tensors_have_handles_of_their_own) {
  Machine machine = machine_of(0);
  const std::uintptr_t small = machine.allocate(100);
  machine.allocate(3 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), kSmallHandle + kHandle);
  CHECK_EQUAL(machine.allocate(1000), small + 512);
  CHECK_EQUAL(runs(machine), 2U);
  for (int i = 0; i < 30; ++i) machine.allocate(700 * KiB);
  CHECK_EQUAL(runs(machine), 2U);
  check_exact(machine);
}

// Only plain device memory is mapped by handles.
TEST(other_kinds_come_from_their_source) {
  for (const MemoryKind kind : {MemoryKind::managed, MemoryKind::pinned, MemoryKind::system}) {
    Machine machine({.config = config_of(kind), .virtual_memory = true});
    machine.allocate(20 * MiB);
    CHECK_EQUAL(machine.source.held_bytes(kind), 20 * MiB);
    CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  }
}

TEST(without_addresses_segments_are_the_sources) {
  Machine machine = machine_of(64 * MiB);
  mapped(machine).refuse_addresses(true);
  machine.allocate(20 * MiB);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::device), 20 * MiB);
  CHECK(!machine.device.segments().front().is_expandable);
  mapped(machine).refuse_addresses(false);  // the heap may hold both
  machine.allocate(20 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), 20 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 40 * MiB);
  check_exact(machine);
}

TEST(all_that_is_free_goes_back) {
  Machine machine = machine_of(0);
  const std::uintptr_t first = machine.allocate(40 * MiB);
  const std::uintptr_t kept = machine.allocate(5 * MiB);
  const std::uintptr_t last = machine.allocate(60 * MiB);
  const std::uintptr_t small = machine.allocate(100, kSide);
  machine.free(first, last, small);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), kHandle);  // what the kept one touches
  CHECK(mapped(machine).holds(kept, 5 * MiB));
  CHECK_EQUAL(runs(machine), 1U);
  check_exact(machine);
  machine.free(kept);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  CHECK(machine.device.segments().empty());
  CHECK_EQUAL(machine.device.stats().budget_bytes.current, 0);

  CHECK_EQUAL(machine.allocate(40 * MiB), first);  // the addresses are kept
  check_exact(machine);
}

// Two free blocks of a stream, between them a live one, and 64 MiB in all.
void leave_two_holes(Machine& machine) {
  const std::uintptr_t first = machine.allocate(24 * MiB, kSide);
  machine.allocate(8 * MiB, kSide);
  machine.free(machine.allocate(32 * MiB, kSide));
  machine.free(first);
}

// Unmapping waits for nothing, so what streams still have to do is waited for before.
TEST(no_handle_leaves_under_work) {
  Machine machine = machine_of(80 * MiB);
  const std::uintptr_t side = machine.allocate(40 * MiB, kSide);
  const std::uintptr_t hole = machine.allocate(24 * MiB);
  machine.allocate(8 * MiB);
  machine.free(side, hole);
  const std::uint64_t side_work = machine.driver.launch(kSide);
  const std::uint64_t main_work = machine.driver.launch(kMain);
  mapped(machine).on_unmap([&] {
    CHECK(machine.driver.done(kMain) >= main_work && machine.driver.done(kSide) >= side_work);
  });
  machine.allocate(72 * MiB);  // takes from both
  CHECK_EQUAL(machine.driver.done(kMain), main_work);
  CHECK_EQUAL(machine.driver.done(kSide), side_work);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_exact(machine);
}

// Not even under that of a stream that has none of it: a program may free what another stream reads.
TEST(no_handle_leaves_under_a_reader) {
  Machine machine = machine_of(72 * MiB);
  machine.allocate(8 * MiB);
  leave_two_holes(machine);
  const std::uint64_t read = machine.driver.launch(kMain);
  mapped(machine).on_unmap([&] { CHECK(machine.driver.done(kMain) >= read); });
  machine.allocate(40 * MiB, kSide + 1);
  CHECK(mapped(machine).unmaps() > 0);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_exact(machine);
}

// A stream without events cannot be waited for.
TEST(without_events_nothing_is_unmapped) {
  Machine machine = machine_of(64 * MiB);
  machine.free(machine.allocate(64 * MiB, kSide));
  machine.driver.refuse_events(true);
  machine.allocate(20 * MiB);
  CHECK_EQUAL(mapped(machine).unmaps(), 0U);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 20 * MiB);
  check_exact(machine);
}

TEST(holes_move_within_a_range) {
  Machine machine = machine_of(120 * MiB);
  std::vector<std::uintptr_t> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(machine.allocate(24 * MiB));
  machine.free(blocks[0], blocks[2]);
  CHECK_EQUAL(budget_bytes(machine), 120 * MiB);
  const std::size_t created = mapped(machine).created();
  const std::uintptr_t large = machine.allocate(48 * MiB);
  CHECK_EQUAL(mapped(machine).created(), created);  // they moved
  CHECK_EQUAL(mapped(machine).held_bytes(), 120 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  for (const std::size_t i : {1, 3, 4}) CHECK(mapped(machine).holds(blocks[i], 24 * MiB));
  CHECK(mapped(machine).holds(large, 48 * MiB));
  check_exact(machine);
}

// Where a hole between tensors needs few handles, they are mapped there.
TEST(holes_are_filled) {
  Machine machine = machine_of(0);
  const std::uintptr_t first = machine.allocate(40 * MiB);
  machine.allocate(8 * MiB);
  machine.free(first);
  machine.device.empty_cache();
  CHECK_EQUAL(machine.allocate(30 * MiB), first);
  CHECK_EQUAL(runs(machine), 2U);
  CHECK_EQUAL(mapped(machine).held_bytes(), 40 * MiB);
  CHECK_EQUAL(machine.allocate(10 * MiB), first + 30 * MiB);
  CHECK_EQUAL(runs(machine), 1U);
  CHECK_EQUAL(mapped(machine).held_bytes(), 48 * MiB);
  check_exact(machine);
}

TEST(handles_move_between_streams) {
  Machine machine = machine_of(64 * MiB);
  leave_two_holes(machine);
  const std::size_t created = mapped(machine).created();
  machine.allocate(40 * MiB);
  CHECK(mapped(machine).unmaps() > 0);
  CHECK_EQUAL(mapped(machine).created(), created);
  CHECK_EQUAL(mapped(machine).held_bytes(), 64 * MiB);
  CHECK_EQUAL(machine.device.stats().num_alloc_retries, 0);
  machine.allocate(16 * MiB, kSide);  // no more was taken than needed
  CHECK_EQUAL(mapped(machine).created(), created);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_exact(machine);
}

TEST(handles_of_small_tensors_move_to_large_ones) {
  Machine machine = machine_of(64 * MiB);
  std::vector<std::uintptr_t> small;
  for (int i = 0; i < 64; ++i) small.push_back(machine.allocate(MiB));
  for (const std::uintptr_t address : small) machine.free(address);
  CHECK_EQUAL(mapped(machine).held_bytes(), 64 * MiB);
  const std::size_t created = mapped(machine).created();
  machine.allocate(60 * MiB);
  CHECK_EQUAL(mapped(machine).created(), created);
  CHECK_EQUAL(mapped(machine).held_bytes(), 64 * MiB);
  CHECK_EQUAL(mapped(machine).peak_bytes(), 64 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_exact(machine);
}

TEST(other_kinds_get_room_too) {
  Config config = budget_config(64 * MiB);
  setting_of(config, TensorClass::weights).kind = MemoryKind::managed;
  Machine machine({.config = config, .virtual_memory = true});
  machine.free(machine.allocate(64 * MiB));
  machine.allocate(20 * MiB, kMain, TensorClass::weights);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::managed), 20 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), 44 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 64 * MiB);
  machine.free(machine.allocate(40 * MiB));
  machine.device.set_device_budget(34 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), 14 * MiB);
  CHECK_EQUAL(budget_bytes(machine), 34 * MiB);
  check_exact(machine);
}

TEST(a_pending_block_is_waited_for_if_that_helps) {
  Machine machine = machine_of(64 * MiB);
  const std::uintptr_t pending = machine.allocate(40 * MiB, kSide);
  machine.allocate(24 * MiB, kSide);
  machine.driver.launch(kMain);
  machine.free_used(pending, kMain);
  machine.allocate(60 * MiB);  // waiting would not help
  CHECK_EQUAL(machine.driver.events(), 1U);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 60 * MiB);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(machine.driver.events(), 0U);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 60 * MiB);
  check_exact(machine);
}

// On a card that others use too, free handles move before the budget is spent, and then the host
// serves. Without a budget it is an out-of-memory.
TEST(a_full_card_moves_handles_and_then_spills) {
  for (const std::size_t budget : {std::size_t{0}, 200 * MiB}) {
    Machine machine = machine_of(budget);
    mapped(machine).set_capacity(96 * MiB);
    const std::uintptr_t free = machine.allocate(40 * MiB);
    const std::uintptr_t kept = machine.allocate(56 * MiB);
    machine.free(free);
    const std::size_t created = mapped(machine).created();
    const std::uintptr_t side = machine.allocate(24 * MiB, kSide);
    CHECK_EQUAL(mapped(machine).created(), created);
    CHECK_EQUAL(mapped(machine).held_bytes(), 96 * MiB);
    CHECK_EQUAL(machine.device.stats().num_alloc_retries, 1);
    check_exact(machine);
    if (budget == 0) {
      CHECK(contains(out_of_memory_text(machine, 40 * MiB), "The memory resource has no more"));
    } else {
      machine.allocate(40 * MiB);
      CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 40 * MiB);
    }
    CHECK(mapped(machine).holds(kept, 56 * MiB));
    CHECK(mapped(machine).holds(side, 24 * MiB));
    check_exact(machine);
  }
}

TEST(a_mapping_that_fails_leaves_nothing) {
  Machine machine = machine_of(64 * MiB);
  leave_two_holes(machine);
  mapped(machine).refuse_maps(true);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 40 * MiB);
  check_exact(machine);
  mapped(machine).refuse_maps(false);
  machine.allocate(20 * MiB);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 40 * MiB);
  check_exact(machine);
}

// A graph writes to its pool's memory at each replay: it stays where it is.
TEST(memory_of_graphs_is_not_mapped) {
  Machine machine = machine_of(64 * MiB);
  machine.device.begin_pool(kPool, [](StreamId stream) { return stream == kCapture; });
  machine.driver.begin_capture(kCapture);
  const std::uintptr_t scratch = machine.allocate(20 * MiB, kCapture);
  CHECK_EQUAL(machine.source.held_bytes(MemoryKind::device), 20 * MiB);
  machine.free(machine.allocate(40 * MiB));  // another stream may grow meanwhile
  machine.free(scratch);
  machine.allocate(46 * MiB);  // but nothing is unmapped
  CHECK_EQUAL(mapped(machine).unmaps(), 0U);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 46 * MiB);
  machine.driver.end_capture(kCapture);
  machine.device.end_pool(kPool);
  machine.allocate(46 * MiB);
  CHECK(machine.source.holds(scratch, 20 * MiB));
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 92 * MiB);
  check_exact(machine);
}

TEST(the_fraction_bounds_what_is_mapped) {
  Machine machine(
      {.config = config_of(MemoryKind::device), .device_bytes = 100 * MiB, .virtual_memory = true});
  machine.device.set_memory_fraction(0.5);
  machine.free(machine.allocate(40 * MiB, kSide));
  machine.allocate(48 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), 48 * MiB);
  CHECK(contains(out_of_memory_text(machine, 12 * MiB), "set_per_process_memory_fraction(0.5"));
  check_exact(machine);

  // Handles that were given back for a request that the fraction then refuses go to the driver.
  Machine full({.config = budget_config(64 * MiB),
                .device_bytes = 100 * MiB,
                .virtual_memory = true});
  leave_two_holes(full);
  full.device.set_memory_fraction(0.3);
  full.allocate(4 * MiB, kSide);
  CHECK(contains(out_of_memory_text(full, 40 * MiB), "set_per_process_memory_fraction(0.3"));
  check_exact(full);
}

// Other GPUs of the process have access from their first allocation on.
TEST(peers_have_access) {
  Machine machine(
      {.config = config_of(MemoryKind::device), .devices = 3, .virtual_memory = true});
  const std::uintptr_t first = machine.allocate_on(0, 20 * MiB);
  CHECK(mapped(machine).holds(first, 20 * MiB, {}));
  const std::uintptr_t second = machine.allocate_on(2, 20 * MiB);
  CHECK(mapped(machine).holds(first, 20 * MiB, {2}));
  CHECK(mapped(machine).holds(second, 20 * MiB, {0}));
  CHECK(mapped(machine).holds(machine.allocate_on(0, 20 * MiB), 20 * MiB, {2}));
}

// Memory that a GPU without access could not even copy.
TEST(refused_peers_get_memory_of_the_source) {
  Machine machine(
      {.config = config_of(MemoryKind::device), .devices = 2, .virtual_memory = true});
  mapped(machine).refuse_peers(true);
  const std::uintptr_t before = machine.allocate_on(0, 20 * MiB);
  machine.free(machine.allocate_on(0, 20 * MiB));
  CHECK(mapped(machine).is_mapped(before));
  for (const int device : {1, 0}) {
    const std::uintptr_t after = machine.allocate_on(device, 20 * MiB);
    CHECK(machine.source.holds(after, 20 * MiB));
    CHECK(machine.allocator.device(device).free(after));
  }
  CHECK_EQUAL(mapped(machine).held_bytes(), round_up(20 * MiB, kHandle));  // what is in use
  machine.free(before);
}

// ---- traces ----

// Tensors of changing sizes that live and die in any order. Each hole between them keeps less than
// two handles: with so much above the live memory, nothing has to go to the host.
TEST(fragmentation_is_bounded) {
  constexpr std::size_t kMostLive = 8 * GiB, kMostBlocks = 60;
  constexpr std::size_t kSlack = 2 * kHandle * (kMostBlocks + 2);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    Machine machine = machine_of(kMostLive + kSlack);
    std::vector<std::pair<std::uintptr_t, std::size_t>> live;
    std::size_t live_bytes = 0;
    for (int i = 0; i < 3000; ++i) {
      const std::size_t most = std::size_t{4 * MiB} << random() % 9;  // up to 1 GiB
      const std::size_t bytes = round_up(2 * MiB + random() % most, kLargeStepBytes);
      while (live.size() == kMostBlocks || live_bytes + bytes > kMostLive) {
        std::swap(live[random() % live.size()], live.back());
        machine.free(live.back().first);
        live_bytes -= live.back().second;
        live.pop_back();
      }
      live.emplace_back(machine.allocate(bytes), bytes);
      live_bytes += bytes;
      CHECK(mapped(machine).held_bytes() <= kMostLive + kSlack);
    }
    CHECK(mapped(machine).peak_bytes() <= kMostLive + kSlack);
    CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 0U);
    CHECK_EQUAL(machine.device.stats().num_alloc_retries, 0);
    CHECK(mapped(machine).unmaps() > 0);  // the budget was met
    check_exact(machine);
    for (const auto& [address, bytes] : live) {
      CHECK(mapped(machine).holds(address, bytes));
      machine.free(address);
    }
    check_exact(machine);
  }
}

// With 2 % above what its tensors take, a training settles; with less, it keeps the budget, and
// less is on the host than without mapped memory.
TEST(a_training_settles) {
  std::int64_t peak_bytes = 0;
  for (const double share : {0.0, 1.02, 1.01, 0.9}) {  // of the peak; 0: no budget
    const auto budget = static_cast<std::size_t>(share * static_cast<double>(peak_bytes));
    Machine machine = machine_of(budget);
    Llama model(machine);
    for (int i = 0; i < 5; ++i) model.step();
    const std::size_t maps = mapped(machine).maps(), unmaps = mapped(machine).unmaps();
    for (int i = 0; i < 10; ++i) model.step();
    if (share == 0) {
      peak_bytes = machine.device.stats().allocated_bytes.all.peak;
      CHECK(static_cast<double>(mapped(machine).peak_bytes()) <
            1.02 * static_cast<double>(peak_bytes));
    } else {
      CHECK(mapped(machine).peak_bytes() <= budget);
    }
    if (share == 0 || share == 1.02) {
      CHECK_EQUAL(mapped(machine).maps(), maps);
      CHECK_EQUAL(mapped(machine).unmaps(), unmaps);
    }
    if (share >= 1) CHECK_EQUAL(pinned_stats(machine).reserved_bytes, 0U);
    check_exact(machine);
  }
}

// Two streams that want the same memory in each step pass it on for ever: neither is served from the
// host.
TEST(streams_share_memory_in_every_step) {
  Machine machine = machine_of(64 * MiB);
  const Step step = {{{.bytes = 40 * MiB}}, {{.bytes = 40 * MiB, .stream = kSide}}};
  for (int i = 0; i < 4; ++i) run_step(machine, step);
  const std::size_t created = mapped(machine).created();
  for (int i = 0; i < 20; ++i) run_step(machine, step);
  CHECK_EQUAL(mapped(machine).created(), created);
  CHECK_EQUAL(pinned_stats(machine).spilled_bytes, 0U);
  check_exact(machine);
}

TEST(two_threads) {
  Machine machine = machine_of(300 * MiB);
  const auto work = [&](StreamId stream, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uintptr_t> live;
    for (int i = 0; i < 4000; ++i) {
      if (live.size() == 8) {
        std::swap(live[random() % 8], live.back());
        machine.free(live.back());
        live.pop_back();
      }
      live.push_back(machine.allocate(1 + random() % (24 * MiB), stream));
      if (random() % 500 == 0) machine.device.empty_cache();
    }
    for (const std::uintptr_t address : live) machine.free(address);
  };
  std::thread other(work, kSide, 1);
  work(kMain, 2);
  other.join();
  CHECK(mapped(machine).peak_bytes() <= 300 * MiB);
  CHECK(mapped(machine).unmaps() > 0);
  check_exact(machine);
}

// An allocator that ends with live tensors gives all handles and addresses back: the fakes check.
TEST(an_allocator_may_end_with_live_tensors) {
  Machine machine = machine_of(0);
  const std::uintptr_t hole = machine.allocate(40 * MiB);
  machine.allocate(30 * MiB);
  machine.allocate(100, kSide);
  machine.free(hole);
  machine.device.empty_cache();
}

}  // namespace
}  // namespace umem
