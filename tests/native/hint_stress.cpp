// Random work in six threads, while the fake driver checks every call.
//
// Usage: hint_stress [steps [seed]]. `steps` is the total over all threads, 60,000 by default.
//
// The threads submit all operations, alone and in batches behind the work of streams, let streams
// finish, forget and unmap memory, and make calls fail. Between rounds all is let
// go, and the books must balance.
#include <barrier>
#include <random>

#include "fake_hint_driver.hpp"

namespace umem {
namespace {

constexpr std::size_t kThreads = 6;
constexpr std::size_t kRounds = 4;
constexpr std::size_t kSharedBlocks = 200;
constexpr std::size_t kOwnBlocks = 40;  // of each thread, which unmaps them at times
constexpr int kDevices = 2;

class Submitter {
 public:
  Submitter(std::size_t number, std::uint64_t seed, HintEngine& engine, FakeHintDriver& driver)
      : number_(number), random_(seed * 1000 + number), engine_(engine), driver_(driver) {}

  void step() {
    switch (below(19)) {
      case 0:
        return forget();
      case 1:
        return static_cast<void>(driver_.launch(device(), stream()));
      case 2:
        return driver_.finish(device(), stream());
      case 3:
        if (!tickets_.empty()) engine_.mark_needed({tickets_[below(tickets_.size())]});
        return;
      case 4:
        if (!tickets_.empty()) engine_.wait(tickets_[below(tickets_.size())], 10'000);
        return;
      case 5:
        if (below(10) == 0) engine_.statistics();
        if (below(10) == 0)
          driver_.fail(std::array{"open", "query", "prefetch", "evict", "advise", "synchronize",
                                  "record"}[below(7)],
                       static_cast<int>(1 + below(3)));
        return;
      case 6:
      case 7:
      case 8:
        return fire();
      default:
        return submit();
    }
  }

  void expect_settled() {
    for (const Ticket ticket : tickets_) {
      // Long ago: its record has given way to a newer one.
      if (const auto outcome = engine_.wait(ticket, kPatienceNs))
        CHECK(*outcome != Outcome::open);
    }
    tickets_.clear();
  }

  std::uint64_t accepted = 0, refused = 0, asked_bytes = 0;

 private:
  std::size_t below(std::size_t end) { return random_() % end; }
  int device() { return static_cast<int>(below(kDevices)); }
  StreamId stream() { return 1 + below(3); }

  Range own() const { return blocks(1000 + 100 * number_, kOwnBlocks); }
  Range range() {
    const bool mine = below(3) == 0;
    const std::size_t bytes = (below(4) == 0 ? 1 + below(16) : 1) * kPageBytes - below(2) * 12345;
    const Range all = mine ? own() : blocks(0, kSharedBlocks);
    return {all.address + below((all.bytes - bytes) / 4096) * 4096, bytes};
  }

  void submit() {
    const HintRequest request{.op = static_cast<HintOp>(below(kHintOps)),
                        .range = range(),
                        .device = device(),
                        .tensor_class = static_cast<TensorClass>(below(kClasses))};
    const Ticket ticket = engine_.submit(request);
    ++(ticket != 0 ? accepted : refused);
    if (ticket == 0) return;
    asked_bytes += request.range.bytes;
    tickets_.push_back(ticket);
  }

  void fire() {
    std::vector<HintRequest> requests;
    for (std::size_t left = 1 + below(8); left != 0; --left)
      requests.push_back({.op = static_cast<HintOp>(below(2)), .range = range()});
    HintBatch batch(device(), requests);
    if (below(3) == 0) {  // skipped
      batch.set_address(0, 0);
      requests.erase(requests.begin());
    }
    const TicketSpan span = engine_.submit_batch(batch, stream());
    for (Ticket ticket = span.first; ticket <= span.last; ++ticket) {
      tickets_.push_back(ticket);
      asked_bytes += requests[ticket - span.first].range.bytes;
    }
    accepted += span.last + 1 - span.first;
    refused += requests.size() - (span.last + 1 - span.first);
  }

  void forget() {
    const Range gone = own();
    CHECK(engine_.forget(gone, kPatienceNs));
    driver_.unmap(gone);
    std::this_thread::yield();
    driver_.map_again(gone);
  }

  const std::size_t number_;
  std::mt19937_64 random_;
  HintEngine& engine_;
  FakeHintDriver& driver_;
  std::vector<Ticket> tickets_;
};

void run(std::size_t steps, std::uint64_t seed) {
  HintMachine machine({.chunk_bytes = 4 * MiB,
                       .in_flight_bytes = 12 * MiB,
                       .capacity = 2048,
                       .prefetch_workers = 3,
                       .poll_ns = 20'000});
  std::vector<std::unique_ptr<Submitter>> submitters;
  for (std::size_t number = 0; number < kThreads; ++number)
    submitters.push_back(
        std::make_unique<Submitter>(number, seed, machine.engine, machine.driver));
  std::barrier barrier(kThreads + 1);
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < kThreads; ++number)
    threads.emplace_back([&, number] {
      machine.driver.forbid_this_thread();
      Submitter& submitter = *submitters[number];
      for (std::size_t round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < steps / kThreads / kRounds; ++i) submitter.step();
        barrier.arrive_and_wait();  // nobody needs streams any more
        barrier.arrive_and_wait();
        submitter.expect_settled();
        barrier.arrive_and_wait();
        barrier.arrive_and_wait();
      }
    });

  for (std::size_t round = 0; round < kRounds; ++round) {
    barrier.arrive_and_wait();
    for (int device = 0; device < kDevices; ++device)
      for (StreamId stream = 1; stream <= 3; ++stream) machine.driver.finish(device, stream);
    barrier.arrive_and_wait();
    barrier.arrive_and_wait();
    const HintStatistics stats = machine.engine.statistics();
    std::uint64_t accepted = 0, refused = 0, asked_bytes = 0;
    for (const auto& submitter : submitters) {
      accepted += submitter->accepted;
      refused += submitter->refused;
      asked_bytes += submitter->asked_bytes;
    }
    const auto outcomes = expect_balanced(stats, accepted, refused, asked_bytes);
    for (std::size_t i = 1; i < kOutcomes; ++i)
      CHECK(outcomes[i] != 0 || round + 1 != kRounds);  // the test reaches every outcome
    CHECK(machine.driver.peak_busy_bytes(Direction::to_device) <= 12 * MiB);
    barrier.arrive_and_wait();
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(machine.engine.shutdown(kPatienceNs));
  CHECK_EQUAL(machine.driver.events(), 0U);
}

}  // namespace
}  // namespace umem

int main(int count, char** arguments) {
  const std::size_t steps = count > 1 ? std::stoul(arguments[1]) : 60'000;
  if (count > 2) {
    umem::run(steps, std::stoul(arguments[2]));
  } else {
    for (const std::uint64_t seed : {1U, 2U, 3U}) umem::run(steps / 3, seed);
  }
  std::cout << "passed: " << steps << " steps" << std::endl;
}
