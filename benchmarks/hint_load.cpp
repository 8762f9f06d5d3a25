// Prints what a hint costs in the hint engine's scheduler, in microseconds, by how many are open.
//
// Usage: hint_load [most [names...]]. From 1,000 open hints by fours up to `most`, 256,000 by
// default. All of this work is done under the engine's lock, where callers may wait for it. See
// docs/hints.md.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hints/hint_scheduler.hpp"

namespace umem {
namespace {

constexpr std::uintptr_t kBase = std::uintptr_t{1} << 44;
constexpr std::size_t kBlockBytes = kLargeStepBytes;
constexpr std::size_t kStreams = 64;
constexpr EventId kEvent = 1;
constexpr std::size_t kLongBytes = std::size_t{64} << 30;
constexpr Lane kToDevice{Direction::to_device, 0}, kToHost{Direction::to_host, 1};

Range block(std::size_t number) { return {kBase + number * kBlockBytes, kBlockBytes}; }

class Load {
 public:
  explicit Load(std::size_t hints)
      : hints(hints), scheduler({.capacity = 2 * hints + 2, .prefetch_workers = 1}, 2) {
    for (std::size_t i = 0; i < hints; ++i) shuffled.push_back(i);
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937_64(1));
  }

  // An event is that of the stream with its number.
  Ticket ask(HintOp op, Range range, EventId event = 0, Ticket after = 0) {
    scheduler.add(
        ++last_,
        {.op = op, .range = range, .event = event, .stream = event % kStreams, .after = after}, 0);
    return last_;
  }
  // Both lanes by turns, each call while the other's is running.
  void issue_all() {
    for (bool any = true; any;) {
      any = false;
      for (const Lane lane : {kToDevice, kToHost}) {
        if (busy_[lane.number]) {
          scheduler.settle(lane, {"", 0}, 0);
          busy_[lane.number] = false;
          any = true;
        }
        if (scheduler.take(lane, 0)) any = busy_[lane.number] = true;
      }
    }
  }

  const std::size_t hints;
  HintScheduler scheduler;
  std::vector<std::size_t> shuffled;

 private:
  Ticket last_ = 0;
  bool busy_[2] = {};
};

void apart(Load& load) {
  for (const std::size_t i : load.shuffled) load.ask(HintOp::prefetch, block(2 * i));
}

// The long range waits for its event and ends where the blocks begin.
void beside_a_long_range(Load& load) {
  load.ask(HintOp::evict, {kBase - kLongBytes, kLongBytes}, kEvent);
  apart(load);
  load.issue_all();
  load.scheduler.fire(kEvent, false, 0);
}

// All come after an eviction that waits for its event.
void after_an_eviction(Load& load) {
  const Ticket out = load.ask(HintOp::evict, block(load.hints + 1), kEvent);
  for (const std::size_t i : load.shuffled) load.ask(HintOp::prefetch, block(i), 0, out);
  load.issue_all();
  load.scheduler.fire(kEvent, false, 0);
}

// Only the last one comes after the eviction.
void next_to_each_other(Load& load) {
  const Ticket out = load.ask(HintOp::evict, block(load.hints + 1), kEvent);
  for (const std::size_t i : load.shuffled)
    load.ask(HintOp::prefetch, block(i), 0, i == load.shuffled.back() ? out : 0);
  load.issue_all();
  load.scheduler.fire(kEvent, false, 0);
}

void behind_advice(Load& load) {
  for (const std::size_t i : load.shuffled) load.ask(HintOp::advise, block(2 * i));
  for (const std::size_t i : load.shuffled) load.ask(HintOp::prefetch, block(2 * i));
}

void again_and_again(Load& load) {
  for (std::size_t i = 0; i < load.hints; ++i) load.ask(HintOp::prefetch, block(i % 100 * 2));
}

void superseded_behind_one_event(Load& load) {
  for (const std::size_t i : load.shuffled) load.ask(HintOp::prefetch, block(2 * i), kEvent);
  for (const std::size_t i : load.shuffled) load.ask(HintOp::evict, block(2 * i));
}

void behind_an_event_each(Load& load) {
  for (const std::size_t i : load.shuffled) load.ask(HintOp::prefetch, block(2 * i), i + 1);
  for (const std::size_t i : load.shuffled) {
    for (const PolledEvent& polled : load.scheduler.events().hold_next())
      load.scheduler.events().let_go(polled.event);
    load.scheduler.fire(i + 1, false, 0);
  }
}

const std::vector<std::pair<std::string, void (*)(Load&)>> kLoads = {
    {"apart", apart},
    {"beside_a_long_range", beside_a_long_range},
    {"after_an_eviction", after_an_eviction},
    {"next_to_each_other", next_to_each_other},
    {"behind_advice", behind_advice},
    {"again_and_again", again_and_again},
    {"superseded_behind_one_event", superseded_behind_one_event},
    {"behind_an_event_each", behind_an_event_each}};

// Of the processor, so that other programs on the machine do not count.
double thread_us() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double measure_us(void (*fill)(Load&), std::size_t hints) {
  Load load(hints);
  const double start_us = thread_us();
  fill(load);
  load.issue_all();
  const double took_us = thread_us() - start_us;
  if (load.scheduler.open_requests() != 0) {
    std::fprintf(stderr, "%zu hints stay open\n", load.scheduler.open_requests());
    std::exit(EXIT_FAILURE);
  }
  return took_us / static_cast<double>(hints);
}

}  // namespace
}  // namespace umem

int main(int count, char** arguments) {
  const std::size_t most = count > 1 ? std::stoul(arguments[1]) : 256'000;
  const std::set<std::string> chosen(arguments + std::min(count, 2), arguments + count);
  std::printf("%-28s", "open hints");
  for (std::size_t hints = 1000; hints <= most; hints *= 4) std::printf(" %9zu", hints);
  std::printf("\n");
  for (const auto& [name, fill] : umem::kLoads) {
    if (!chosen.empty() && !chosen.contains(name)) continue;
    std::printf("%-28s", name.c_str());
    for (std::size_t hints = 1000; hints <= most; hints *= 4) {
      std::printf(" %6.2f us", umem::measure_us(fill, hints));
      std::fflush(stdout);
    }
    std::printf("\n");
  }
}
