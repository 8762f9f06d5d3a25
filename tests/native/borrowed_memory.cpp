// Free memory of one stream that serves another one behind its work.
#include <map>

#include "core/host.hpp"
#include "steps.hpp"

namespace umem {
namespace {

constexpr std::size_t kBudget = 64 * MiB;

std::size_t calls(const Machine& machine) {
  return mapped(machine).created() + mapped(machine).maps() + mapped(machine).unmaps();
}

std::size_t spilled_bytes(const Machine& machine) { return pinned_stats(machine).spilled_bytes; }

// The side stream has the whole budget, and work that may use it; none of it is live.
struct Spent : Machine {
  Spent() : Machine({.config = budget_config(kBudget), .virtual_memory = true}) { free(address); }

  // The main stream borrows a part of it, gets work and frees it: the mark of the work.
  std::uint64_t borrow_and_free() {
    const std::uintptr_t borrowed = allocate(40 * MiB);
    const std::uint64_t work_of_borrower = driver.launch(kMain);
    free(borrowed);
    return work_of_borrower;
  }

  bool runs_behind(StreamId later, StreamId earlier, std::uint64_t mark) {
    return driver.runs_behind({0, later}, {0, earlier}, mark);
  }

  const std::uintptr_t address = allocate(kBudget, kSide);
  const std::uint64_t work = driver.launch(kSide);
};

TEST(a_stream_waits_for_another_and_the_host_does_not) {
  Spent machine;
  const std::size_t before = calls(machine);
  CHECK(!machine.runs_behind(kMain, kSide, machine.work));
  CHECK_EQUAL(machine.allocate(40 * MiB), machine.address);
  CHECK(machine.runs_behind(kMain, kSide, machine.work));
  CHECK_EQUAL(machine.driver.done(kSide), 0U);
  CHECK_EQUAL(calls(machine), before);
  CHECK_EQUAL(machine.driver.events(), 0U);
  CHECK_EQUAL(budget_bytes(machine), kBudget);
  CHECK_EQUAL(spilled_bytes(machine), 0U);
}

TEST(the_smallest_block_that_is_enough_is_borrowed) {
  Machine machine = machine_of(kBudget);
  const std::uintptr_t large = machine.allocate(40 * MiB, kSide);
  const std::uintptr_t small = machine.allocate(24 * MiB, kSide + 1);
  machine.free(large, small);
  CHECK_EQUAL(machine.allocate(20 * MiB), small);
}

// A program may free what another stream reads, and have the owner wait for that before it asks for
// memory again. The borrower cannot know.
TEST(a_stream_waits_for_all_that_may_still_read_it) {
  Machine machine = machine_of(kBudget);
  machine.free(machine.allocate(4 * MiB));
  const std::uintptr_t address = machine.allocate(60 * MiB, kSide);
  const std::uint64_t read = machine.driver.launch(kMain);
  machine.free(address);
  CHECK_EQUAL(machine.allocate(40 * MiB, kSide + 1), address);
  CHECK(machine.driver.runs_behind({0, kSide + 1}, {0, kMain}, read));
  CHECK_EQUAL(machine.driver.done(kMain), 0U);
}

// Two own streams of umem's and one of the program have memory, and work in their queues.
struct OwnStreams {
  static constexpr StreamId kOwn = 8, kOther = 9, kLater = 10;
  Machine machine{{.config = budget_config(kBudget), .virtual_memory = true}};
  std::map<StreamId, std::uint64_t> work;

  // All free memory is the owner's, in one block or in two.
  explicit OwnStreams(StreamId owner, bool in_two = false) {
    machine.device.add_own_stream(kOwn);
    machine.device.add_own_stream(kOther);
    for (const StreamId stream : {kSide, kOwn, kOther}) {
      machine.allocate(4 * MiB, stream);
      work[stream] = machine.driver.launch(stream);
    }
    const std::uintptr_t first = machine.allocate(24 * MiB, owner);
    const std::uintptr_t between = machine.allocate(4 * MiB, owner);
    const std::uintptr_t second = machine.allocate(24 * MiB, owner);
    for (const std::uintptr_t free : {first, second}) machine.free(free);
    if (!in_two) machine.free(between);
  }

  bool waits_for(StreamId stream) {
    return machine.driver.runs_behind({0, kLater}, {0, stream}, work.at(stream));
  }
};

TEST(own_streams_are_not_waited_for) {
  OwnStreams streams(kSide);
  streams.machine.allocate(40 * MiB, OwnStreams::kLater);
  CHECK_EQUAL(spilled_bytes(streams.machine), 0U);
  CHECK(streams.waits_for(kSide));
  CHECK(!streams.waits_for(OwnStreams::kOwn));
  CHECK(!streams.waits_for(OwnStreams::kOther));
}

TEST(own_streams_are_waited_for_where_memory_is_theirs) {
  OwnStreams streams(OwnStreams::kOwn);
  streams.machine.allocate(40 * MiB, OwnStreams::kLater);
  CHECK_EQUAL(spilled_bytes(streams.machine), 0U);
  for (const StreamId stream : {kSide, OwnStreams::kOwn, OwnStreams::kOther})
    CHECK(streams.waits_for(stream));
}

// The host waits for a stream whose memory goes to another one, and not for own streams.
TEST(handles_leave_a_stream_without_own_streams) {
  OwnStreams streams(kSide, true);
  Machine& machine = streams.machine;
  machine.allocate(40 * MiB, OwnStreams::kLater);
  CHECK_EQUAL(spilled_bytes(machine), 0U);
  CHECK_EQUAL(machine.driver.done(kSide), streams.work.at(kSide));
  CHECK_EQUAL(machine.driver.done(OwnStreams::kOwn), 0U);
  CHECK_EQUAL(machine.driver.done(OwnStreams::kOther), 0U);
}

TEST(own_streams_lend_last) {
  Machine machine = machine_of(kBudget);
  machine.device.add_own_stream(OwnStreams::kOwn);
  const std::uintptr_t programs = machine.allocate(40 * MiB, kSide);
  const std::uintptr_t own = machine.allocate(24 * MiB, OwnStreams::kOwn);
  machine.free(programs, own);
  CHECK_EQUAL(machine.allocate(20 * MiB), programs);
  CHECK_EQUAL(machine.allocate(24 * MiB, kSide + 1), own);
  CHECK_EQUAL(spilled_bytes(machine), 0U);
}

// An update's temporary tensors may lie in the program's memory, which has other memory meanwhile.
TEST(what_own_streams_have_borrowed_is_taken_back_last) {
  Machine machine = machine_of(kBudget);
  machine.device.add_own_stream(OwnStreams::kOwn);
  machine.allocate(4 * MiB, OwnStreams::kOwn);
  const std::uintptr_t main = machine.allocate(24 * MiB);
  const std::uintptr_t side = machine.allocate(16 * MiB, kSide);
  machine.allocate(20 * MiB, kSide);
  machine.free(side);
  CHECK_EQUAL(machine.allocate(16 * MiB, OwnStreams::kOwn), side);
  const std::uint64_t work = machine.driver.launch(OwnStreams::kOwn);
  machine.free(side, main);
  const auto waits = [&] {
    return machine.driver.runs_behind({0, kSide}, {0, OwnStreams::kOwn}, work);
  };
  CHECK_EQUAL(machine.allocate(16 * MiB, kSide), main);
  CHECK(!waits());
  CHECK_EQUAL(machine.allocate(16 * MiB, kSide), side);
  CHECK(waits());
  CHECK_EQUAL(machine.driver.done(OwnStreams::kOwn), 0U);
  CHECK_EQUAL(spilled_bytes(machine), 0U);
}

// As long as its owner does not need it, nothing has to be waited for again.
TEST(the_borrower_uses_it_again) {
  Spent machine;
  machine.free(machine.allocate(40 * MiB));
  const std::uint64_t later = machine.driver.launch(kSide);
  CHECK_EQUAL(machine.allocate(40 * MiB), machine.address);
  CHECK(!machine.runs_behind(kMain, kSide, later));
  CHECK_EQUAL(machine.allocate(24 * MiB, kSide), machine.address + 40 * MiB);
}

TEST(the_owner_takes_back_what_is_free) {
  Spent machine;
  const std::uint64_t work = machine.borrow_and_free();
  const std::size_t before = calls(machine);
  CHECK_EQUAL(machine.allocate(kBudget, kSide), machine.address);
  CHECK(machine.runs_behind(kSide, kMain, work));
  CHECK_EQUAL(machine.driver.done(kMain), 0U);
  CHECK_EQUAL(calls(machine), before);
  CHECK_EQUAL(spilled_bytes(machine), 0U);
}

TEST(the_owner_does_not_take_what_is_live) {
  Spent machine;
  const std::uintptr_t borrowed = machine.allocate(40 * MiB);
  machine.allocate(kBudget, kSide);
  CHECK_EQUAL(spilled_bytes(machine), kBudget);
  machine.allocate(24 * MiB, kSide);
  CHECK_EQUAL(spilled_bytes(machine), kBudget);
  machine.free(borrowed);
  CHECK_EQUAL(machine.allocate(40 * MiB, kSide), borrowed);
}

// A third stream gets what nobody uses, whoever has borrowed it.
TEST(a_third_stream_borrows_it_from_the_owner) {
  Spent machine;
  const std::uint64_t work = machine.borrow_and_free();
  CHECK_EQUAL(machine.allocate(60 * MiB, kSide + 1), machine.address);
  CHECK(machine.runs_behind(kSide + 1, kSide, machine.work));
  CHECK(machine.runs_behind(kSide + 1, kMain, work));
  CHECK_EQUAL(machine.driver.done(kMain) + machine.driver.done(kSide), 0U);
}

// Streams beside the borrower's, of which the owner's is one, are waited for as with any block.
TEST(recorded_streams_are_waited_for) {
  Spent machine;
  const std::uintptr_t borrowed = machine.allocate(kBudget);
  machine.free_used(borrowed, kMain);
  CHECK_EQUAL(machine.driver.events(), 0U);
  CHECK_EQUAL(machine.allocate(kBudget), borrowed);

  machine.device.record_stream(borrowed, kSide);
  const std::uint64_t work = machine.driver.launch(kSide);
  machine.free(borrowed);
  CHECK_EQUAL(machine.driver.events(), 1U);
  CHECK_EQUAL(machine.allocate(kBudget), borrowed);  // nothing else would be on the device
  CHECK_EQUAL(machine.driver.done(kSide), work);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

// A capture cannot be put in order with other work: the host waits for the owner and moves handles,
// or serves the request where the owner cannot be waited for either.
TEST(captures_neither_lend_nor_borrow) {
  for (const StreamId capturing : {kMain, kSide}) {
    Spent machine;
    machine.driver.begin_capture(capturing);
    CHECK(machine.allocate(40 * MiB) != machine.address);
    CHECK_EQUAL(machine.driver.done(kSide), capturing == kMain ? machine.work : 0U);
    CHECK_EQUAL(spilled_bytes(machine), capturing == kMain ? 0U : 40 * MiB);
  }
}

TEST(what_a_capture_has_borrowed_returns_after_it) {
  Spent machine;
  const std::uintptr_t borrowed = machine.allocate(40 * MiB);
  machine.driver.begin_capture(kMain);
  machine.free(borrowed);
  machine.allocate(kBudget, kSide);
  CHECK_EQUAL(spilled_bytes(machine), kBudget);
  machine.driver.end_capture(kMain);
  CHECK_EQUAL(machine.allocate(kBudget, kSide), machine.address);
}

TEST(where_streams_cannot_be_put_in_order_nothing_is_borrowed) {
  Spent machine;
  machine.driver.refuse_events(true);
  machine.allocate(40 * MiB);
  CHECK_EQUAL(spilled_bytes(machine), 40 * MiB);
  machine.driver.refuse_events(false);
  const std::uintptr_t borrowed = machine.allocate(48 * MiB);
  CHECK_EQUAL(borrowed, machine.address);
  machine.free(borrowed);
  machine.driver.refuse_events(true);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), kBudget);
  machine.driver.refuse_events(false);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
}

TEST(it_goes_back_like_all_free_memory) {
  Spent machine;
  const std::uint64_t work = machine.borrow_and_free();
  bool was_over = true;
  mapped(machine).on_unmap([&] { was_over = was_over && machine.driver.done(kMain) >= work; });
  machine.device.set_device_budget(10 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), 10 * MiB);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  CHECK(was_over);
  CHECK_EQUAL(machine.driver.events(), 0U);
}

TEST(it_outlasts_a_pause) {
  Spent machine;
  const std::uintptr_t borrowed = machine.allocate(40 * MiB);
  const PauseReport report = machine.device.pause(kHost);
  CHECK_EQUAL(report.host_bytes, 40 * MiB);
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
  machine.device.resume();
  CHECK(mapped(machine).holds(borrowed, 40 * MiB));
  machine.free(borrowed);
  CHECK_EQUAL(machine.allocate(40 * MiB), borrowed);
  machine.free(borrowed);
  machine.device.empty_cache();
  CHECK_EQUAL(mapped(machine).held_bytes(), 0U);
}

// Others use the card too, or there is no budget.
TEST(a_card_that_is_full_lends_too) {
  Machine machine({.config = config_of(MemoryKind::device), .virtual_memory = true});
  mapped(machine).set_capacity(kBudget);
  const std::uintptr_t side = machine.allocate(kBudget, kSide);
  const std::uint64_t work = machine.driver.launch(kSide);
  machine.free(side);
  const std::size_t unmaps = mapped(machine).unmaps();
  CHECK_EQUAL(machine.allocate(40 * MiB), side);
  CHECK(machine.driver.runs_behind({0, kMain}, {0, kSide}, work));
  CHECK_EQUAL(machine.driver.done(kSide), 0U);
  CHECK_EQUAL(mapped(machine).unmaps(), unmaps);
}

}  // namespace
}  // namespace umem
