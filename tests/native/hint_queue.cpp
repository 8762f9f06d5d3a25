// The queue against a plain model of it.
#include <map>
#include <random>

#include "check.hpp"
#include "hints/hint_queue.hpp"

namespace umem {
namespace {

TEST(a_cut_leaves_both_ends) {
  HintQueue queue(100);
  const Piece piece{.ticket = 1, .range = {100, 100}, .ready = true};
  queue.add(piece);
  CHECK_EQUAL(queue.cut(piece, {120, 30}), 30U);
  CHECK_EQUAL(queue.pieces(), 2U);
  CHECK_EQUAL(queue.bytes(), 70U);
  CHECK_EQUAL(queue.piece(1, 100).range.bytes, 20U);
  CHECK_EQUAL(queue.piece(1, 150).range.bytes, 50U);
  CHECK_EQUAL(queue.ready(Direction::to_device, 0).size(), 2U);
  CHECK_EQUAL(queue.cut(queue.piece(1, 150), {0, 1000}), 50U);
  CHECK_EQUAL(queue.cut(queue.piece(1, 100), {0, 100}), 0U);  // touches it, no more
  CHECK_EQUAL(queue.bytes(), 20U);
}

TEST(a_full_queue_gives_up_what_a_cut_splits_off) {
  HintQueue queue(1);
  const Piece piece{.ticket = 1, .range = {100, 100}};
  queue.add(piece);
  CHECK_EQUAL(queue.cut(piece, {120, 30}), 80U);
  CHECK_EQUAL(queue.pieces(), 1U);
  CHECK_EQUAL(queue.bytes(), 20U);
}

TEST(only_ready_pieces_are_in_order) {
  HintQueue queue(100);
  const auto add = [&](Ticket ticket, std::uintptr_t address, int device, bool ready) {
    queue.add({ticket, {address, 10}, HintOp::evict, device, ready});
  };
  add(3, 500, 0, true);
  add(1, 900, 0, true);
  add(2, 100, 0, false);
  add(4, 300, 1, true);
  const auto first = [&](const std::vector<int>& without) {
    const auto piece = queue.first_ready(Direction::to_host, without);
    return piece ? piece->ticket : 0;
  };
  CHECK(!queue.any_ready(Direction::to_device));
  CHECK(queue.ready(Direction::to_device, 0).empty());
  CHECK((queue.ready(Direction::to_host, 0) == HintQueue::Order{{1, 900}, {3, 500}}));
  CHECK_EQUAL(first({}), 1U);
  CHECK_EQUAL(first({0}), 4U);
  CHECK_EQUAL(first({1, 0}), 0U);
  queue.set_ready(2);
  CHECK((queue.ready(Direction::to_host, 0) == HintQueue::Order{{1, 900}, {2, 100}, {3, 500}}));
  CHECK_EQUAL(queue.ready_starting_at(HintOp::evict, 0, 500).size(), 1U);
  CHECK_EQUAL(queue.ready_ending_at(HintOp::evict, 0, 510).size(), 1U);
  CHECK(queue.ready_starting_at(HintOp::evict, 0, 501).empty());
  CHECK(queue.ready_ending_at(HintOp::evict, 0, 505).empty());
  CHECK(queue.ready_starting_at(HintOp::evict, 1, 500).empty());
  CHECK(queue.ready_starting_at(HintOp::advise, 0, 500).empty());
}

TEST(of_one_range_only_the_oldest_is_offered) {
  HintQueue queue(100);
  for (const Ticket ticket : {5, 3, 7})
    queue.add({.ticket = ticket, .range = {100, 10}, .ready = ticket != 3});
  const auto ready = [&] { return queue.ready(Direction::to_device, 0); };
  CHECK((ready() == HintQueue::Order{{5, 100}}));
  queue.park(queue.piece(5, 100), {.lane = 1});
  CHECK(!queue.any_ready(Direction::to_device));
  CHECK(queue.ready_starting_at(HintOp::prefetch, 0, 100).empty());
  queue.unpark({.lane = 0});
  CHECK(ready().empty());
  queue.unpark({.lane = 1});
  CHECK((ready() == HintQueue::Order{{5, 100}}));
  queue.park(queue.piece(5, 100), {.ticket = 2});
  queue.set_ready(3);  // an older one may be free
  CHECK((ready() == HintQueue::Order{{3, 100}}));
  queue.park(queue.piece(3, 100), {.ticket = 2});
  queue.cut(queue.piece(3, 100), {100, 10});  // the next in its place
  CHECK((ready() == HintQueue::Order{{5, 100}}));
  queue.unpark({.ticket = 2});
  queue.cut(queue.piece(5, 100), {105, 5});  // its rest is another range
  CHECK((ready() == HintQueue::Order{{5, 100}, {7, 100}}));
}

// Ranges of very different lengths: one that starts far below may reach into a small one.
Range random_range(std::mt19937_64& random, std::size_t end) {
  const std::size_t start = 1 + random() % (end - 1);
  const std::size_t rest = end - start;
  return {start, 1 + random() % (random() % 4 == 0 ? rest : std::min<std::size_t>(rest, 8))};
}

TEST(the_queue_is_as_a_table_of_bytes) {
  constexpr std::size_t kEnd = 400;
  std::mt19937_64 random(20261121);
  HintQueue queue(1'000'000);
  std::map<Ticket, std::vector<bool>> table;  // by ticket, which bytes are queued
  Ticket last = 0;
  for (int step = 0; step < 1500; ++step) {  // each looks at all tickets so far
    const Range range = random_range(random, kEnd);
    if (random() % 3 == 0) {
      queue.add({.ticket = ++last, .range = range});
      table[last].resize(2 * kEnd);
      std::fill_n(table[last].begin() + static_cast<std::ptrdiff_t>(range.address), range.bytes,
                  true);
    } else {
      std::size_t expected = 0, actual = 0;
      for (auto& [ticket, bytes] : table)
        for (std::size_t i = range.address; i < end_of(range); ++i) {
          expected += bytes[i];
          bytes[i] = false;
        }
      for (const Piece& piece : queue.overlapping(range)) actual += queue.cut(piece, range);
      CHECK_EQUAL(actual, expected);
    }
    std::size_t queued = 0;
    for (const auto& [ticket, bytes] : table)
      queued += static_cast<std::size_t>(std::count(bytes.begin(), bytes.end(), true));
    CHECK_EQUAL(queue.bytes(), queued);
    const Range asked = random_range(random, kEnd);
    std::size_t found = 0, expected = 0;
    for (const Piece& piece : queue.overlapping(asked)) found += common(piece.range, asked).bytes;
    for (const auto& [ticket, bytes] : table)
      for (std::size_t i = asked.address; i < end_of(asked); ++i) expected += bytes[i];
    CHECK_EQUAL(found, expected);
  }
  CHECK(last > 400);
}

}  // namespace
}  // namespace umem
