// A million hints over 100,000 blocks and 64 streams, with many of them open: what the engine does
// for one must not grow with the number of others. Fewer under a sanitizer.
//
// Usage: hint_load [hints [seed]].
#include <random>

#include "fake_hint_driver.hpp"

namespace umem {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kHints = 40'000;
constexpr std::size_t kCapacity = 1U << 13;
#else
constexpr std::size_t kHints = 1'000'000;
constexpr std::size_t kCapacity = 1U << 16;
#endif
constexpr std::size_t kBlocks = 100'000;
constexpr std::size_t kBlockBytes = kLargeStepBytes;
constexpr std::size_t kStreams = 64;
constexpr std::size_t kThreads = 4;
constexpr std::size_t kStreamsOfThread = kStreams / kThreads;
constexpr std::uintptr_t kBase = std::uintptr_t{1} << 40;

// Moves nothing and logs nothing. Events are those of streams that work until they are told to
// finish; two lanes never work on the same bytes.
class CountingDriver final : public HintDriver {
 public:
  void launch(StreamId stream) { ++streams_[stream].launched; }
  void finish(StreamId stream) { streams_[stream].done = streams_[stream].launched.load(); }

  // A mark of the stream's work. The same one may be recorded again, so it is numbered, too.
  EventId record(int, StreamId stream) noexcept override {
    return (++recorded_ << 32) | (streams_[stream].launched.load() << 8) | stream;
  }
  void recycle(EventId) noexcept override {}
  int open(Lane, int) noexcept override { return 0; }
  int separate(Lane, int) noexcept override { return 0; }
  void close(Lane) noexcept override {}
  int query(Lane, int, EventId event, bool& finished) noexcept override {
    finished = streams_[event & 0xff].done.load() >= ((event >> 8) & 0xff'ffff);
    return 0;
  }
  int prefetch(Lane lane, int, Range range) noexcept override { return begin(lane, range); }
  int evict(Lane lane, int, Range range) noexcept override { return begin(lane, range); }
  int advise(Lane lane, int, Range range, Advice) noexcept override { return begin(lane, range); }
  int synchronize(Lane lane, int) noexcept override {
    const std::lock_guard lock(mutex_);
    busy_[lane.number] = {};
    return 0;
  }
  std::string describe(int) const override { return "no error"; }

 private:
  struct Stream {
    std::atomic<std::uint64_t> launched{0}, done{0};
  };

  int begin(Lane lane, Range range) noexcept {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, busy] : busy_)
      CHECK(number == lane.number || !overlap(busy, range));
    busy_[lane.number] = range;
    return 0;
  }

  std::array<Stream, kStreams> streams_;
  std::atomic<std::uint64_t> recorded_{0};
  std::mutex mutex_;
  std::map<int, Range> busy_;  // by lane
};

// One training thread: batches behind the work of its streams, and single requests.
class Thread {
 public:
  Thread(std::size_t number, std::uint64_t seed, HintEngine& engine, CountingDriver& driver)
      : number_(number), random_(seed * 1000 + number), engine_(engine), driver_(driver) {}

  void run(std::size_t hints) {
    while (accepted < hints) {
      const StreamId stream = number_ * kStreamsOfThread + below(kStreamsOfThread);
      driver_.launch(stream);
      const std::uint64_t refused_before = refused;
      below(4) == 0 ? submit_each() : submit_batch(stream);
      if (refused != refused_before) finish();
    }
    finish();
  }

  std::uint64_t accepted = 0, refused = 0, asked_bytes = 0;

 private:
  std::size_t below(std::size_t end) { return random_() % end; }
  Range block() { return {kBase + below(kBlocks) * kBlockBytes, kBlockBytes}; }

  void submit_batch(StreamId stream) {
    std::vector<HintRequest> requests(16);
    for (HintRequest& request : requests)
      request = {.op = static_cast<HintOp>(below(2)), .range = block()};
    HintBatch batch(0, requests);
    const TicketSpan span = engine_.submit_batch(batch, stream);
    count(span.last + 1 - span.first, requests.size());
  }

  void submit_each() {
    for (const HintOp op : {HintOp::evict, HintOp::prefetch, HintOp::advise})
      count(engine_.submit({.op = op, .range = block()}) != 0, 1);
  }

  void count(std::uint64_t taken, std::uint64_t asked) {
    accepted += taken;
    refused += asked - taken;
    asked_bytes += taken * kBlockBytes;
  }

  // The queue is full: the streams end their work, and the engine gets the processor.
  void finish() {
    for (std::size_t i = 0; i < kStreamsOfThread; ++i)
      driver_.finish(number_ * kStreamsOfThread + i);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const std::size_t number_;
  std::mt19937_64 random_;
  HintEngine& engine_;
  CountingDriver& driver_;
};

void run(std::size_t hints, std::uint64_t seed) {
  auto owner = std::make_unique<CountingDriver>();
  CountingDriver& driver = *owner;
  HintEngine engine({.capacity = kCapacity, .prefetch_workers = 3}, std::move(owner));
  std::vector<Thread> users;
  for (std::size_t number = 0; number < kThreads; ++number)
    users.emplace_back(number, seed, engine, driver);
  std::vector<std::thread> threads;
  for (Thread& user : users) threads.emplace_back([&] { user.run(hints / kThreads); });
  for (std::thread& thread : threads) thread.join();
  for (StreamId stream = 0; stream < kStreams; ++stream) driver.finish(stream);
  // Behind all others in its lane.
  const Range all{kBase, kBlocks * kBlockBytes};
  Ticket last = 0;
  while (last == 0) last = engine.submit({.op = HintOp::advise, .range = all});
  CHECK(engine.wait(last, kPatienceNs) == Outcome::done);
  while (engine.statistics().open_requests != 0) std::this_thread::yield();

  std::uint64_t accepted = 1, refused = 0, asked_bytes = all.bytes;
  for (const Thread& user : users) {
    accepted += user.accepted;
    refused += user.refused;
    asked_bytes += user.asked_bytes;
  }
  const HintStatistics stats = engine.statistics();
  expect_balanced(stats, accepted, stats.refused, asked_bytes);
  CHECK(stats.refused >= refused);  // and the last one, as often as the queue was full
  CHECK(stats.failures.empty());
  CHECK(engine.shutdown(kPatienceNs));
}

}  // namespace
}  // namespace umem

int main(int count, char** arguments) {
  const std::size_t hints = count > 1 ? std::stoul(arguments[1]) : umem::kHints;
  umem::run(hints, count > 2 ? std::stoul(arguments[2]) : 1);
  std::cout << "passed: " << hints << " hints" << std::endl;
}
