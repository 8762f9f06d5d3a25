// A driver whose calls end when the test says so, and which checks how the hint engine treats it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "faults.hpp"
#include "hints/hint_engine.hpp"
#include "locked.hpp"

namespace umem {

inline constexpr std::int64_t kSoonNs = 20'000'000;            // what cannot happen has not by then
inline constexpr std::int64_t kPatienceNs = 20'000'000'000;    // what must happen has by then

// A prefetch and an eviction may be under way at once, and no two of a kind.
inline constexpr HintSettings kOneLane{.chunk_bytes = 8 * MiB,
                                .in_flight_bytes = 64 * MiB,
                                .prefetch_workers = 1};

// Block number `n` of 2 MiB. Nothing is ever stored there.
constexpr std::uintptr_t at(std::size_t n) { return (std::uintptr_t{1} << 40) + n * kPageBytes; }
constexpr Range blocks(std::size_t first, std::size_t count) {
  return {at(first), count * kPageBytes};
}
inline bool operator==(Range a, Range b) { return a.address == b.address && a.bytes == b.bytes; }

struct HintCall {
  std::string name;
  Lane lane;
  int device = 0;
  Range range{};
  Advice advice{};
};

// Each call is logged, may be held up, and may be made to fail. A lane has one thread; two calls
// never work on the same bytes at once; memory that was unmapped is never named; nor is an event
// that was recycled.
class FakeHintDriver final : public HintDriver, Locked {
 public:
  ~FakeHintDriver() override;

  EventId record(int device, StreamId stream) noexcept override;
  void recycle(EventId event) noexcept override;
  int open(Lane lane, int device) noexcept override;
  int separate(Lane lane, int device) noexcept override;
  void close(Lane lane) noexcept override;
  int query(Lane lane, int device, EventId id, bool& finished) noexcept override;
  int prefetch(Lane lane, int device, Range range) noexcept override {
    return work({"prefetch", lane, device, range});
  }
  int evict(Lane lane, int device, Range range) noexcept override {
    return work({"evict", lane, device, range});
  }
  int advise(Lane lane, int device, Range range, Advice advice) noexcept override {
    return work({"advise", lane, device, range, advice});
  }
  int synchronize(Lane lane, int device) noexcept override;
  std::string describe(int error) const override;

  // ---- what tests say ----

  // Calls of this name wait inside the driver until let_go.
  void hold(const std::string& name);
  void let_go(const std::string& name);
  // Lets one call through that is held now.
  void let_one_go(const std::string& name);
  void wait_until_held(const std::string& name, std::size_t calls = 1);
  // The next `times` calls of this name fail with `error`.
  void fail(const std::string& name, int error, int times = 1);
  // The call with this number fails with `error`, counted from now over calls of all names.
  void fail_at(std::int64_t number, int error) {
    faults_.fail_at(number);
    error_ = error;
  }
  std::int64_t fallible_calls() const { return faults_.calls(); }
  // From now on a worker that describes an error finds no host memory.
  void run_out_of_memory() { no_memory_ = true; }
  // From now on a call on these bytes would be a fault.
  void unmap(Range range);
  void map_again(Range range);
  // This thread trains: record is the only call that it may make.
  void forbid_this_thread();
  void launch(int device, StreamId stream);
  void finish(int device, StreamId stream);

  // ---- what tests ask ----

  // Calls that move or advise, in the order in which they began.
  std::vector<HintCall> calls() { return read(calls_); }
  std::size_t count(const std::string& name);
  std::size_t events() { return read(events_).size(); }
  // The most bytes that were ever on their way in one direction.
  std::size_t peak_busy_bytes(Direction direction) { return read(peak_busy_[number_of(direction)]); }
  // 2 MiB blocks that prefetches have brought to the device and evictions have not taken away.
  std::size_t peak_blocks() { return read(peak_blocks_); }

 private:
  struct Event {
    int device;
    StreamId stream;
    std::uint64_t mark;
  };
  struct Stream {
    std::uint64_t launched = 0;
    std::uint64_t done = 0;
  };

  int fails(const std::string& name);
  int enter(const HintCall& call, std::unique_lock<std::mutex>& lock);
  // The bytes are in use from here to the end of the lane's next synchronize.
  int work(const HintCall& call);
  void move(Range range, bool comes);

  Faults faults_;
  std::atomic<int> error_{0};
  std::atomic<bool> no_memory_{false};
  std::condition_variable changed_;
  std::vector<HintCall> calls_;
  std::map<std::string, std::size_t> counts_;
  std::map<int, Range> busy_;  // by lane
  std::map<int, Direction> directions_;
  std::array<std::size_t, kDirections> peak_busy_{};
  std::set<std::uintptr_t> resident_;
  std::size_t peak_blocks_ = 0;
  std::set<std::pair<int, int>> opened_;  // lane, device
  std::map<int, std::thread::id> threads_;
  std::set<std::thread::id> forbidden_;
  std::vector<Range> unmapped_;
  std::set<std::string> held_names_;
  std::map<std::string, std::size_t> held_;
  std::map<std::string, std::size_t> passes_;
  std::map<std::string, std::pair<int, int>> failures_;  // error, times
  EventId last_event_ = 0;
  std::map<EventId, Event> events_;
  std::map<std::pair<int, StreamId>, Stream> streams_;
};

// The books of an engine at rest: every ticket has an outcome, every byte was moved or wasted, and
// nothing is queued. Returns the requests by outcome.
std::array<std::uint64_t, kOutcomes> expect_balanced(const HintStatistics& stats,
                                                     std::uint64_t accepted, std::uint64_t refused,
                                                     std::uint64_t asked_bytes);

// An engine over the fake, and shorthand.
class HintMachine {
 public:
  explicit HintMachine(const HintSettings& settings = {});

  Ticket ask(HintOp op, Range range, int device = 0);
  Ticket prefetch(Range range) { return ask(HintOp::prefetch, range); }
  Ticket evict(Range range) { return ask(HintOp::evict, range); }

  // Held up in its call of the driver, as all calls of this name until let_go.
  Ticket hold(HintOp op, Range range);
  // Behind what the stream holds now. Without an answer if the queue is full.
  Ticket ask_behind(HintOp op, Range range, StreamId stream = 7, int device = 0, Ticket after = 0);
  // Behind work that has not ended.
  Ticket ask_behind_work(HintOp op, Range range, StreamId stream = 7) {
    driver.launch(0, stream);
    return ask_behind(op, range, stream);
  }

  void expect(Ticket ticket, Outcome outcome);
  template <class... Tickets>
  void expect_done(Tickets... tickets) {
    (expect(tickets, Outcome::done), ...);
  }
  // Not over now, nor soon.
  void expect_open(Ticket ticket);
  HintCounts counts(HintOp op, TensorClass tensor_class = TensorClass::other);
  std::uint64_t requests(HintOp op, Outcome outcome);

 private:
  HintMachine(const HintSettings& settings, std::unique_ptr<FakeHintDriver> owner);

 public:
  FakeHintDriver& driver;
  HintEngine engine;
};

}  // namespace umem
