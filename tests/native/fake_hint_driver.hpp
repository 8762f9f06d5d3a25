// A driver whose calls end when the test says so, and which checks how the hint engine treats it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "hints/hint_engine.hpp"

namespace umem {

inline constexpr std::size_t MiB = std::size_t{1} << 20;
inline constexpr std::size_t GiB = std::size_t{1} << 30;
inline constexpr std::int64_t kSoonNs = 20'000'000;            // what cannot happen has not by then
inline constexpr std::int64_t kPatienceNs = 20'000'000'000;    // what must happen has by then

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
  std::uintptr_t from = 0;  // copy; `range` is its destination
  Advice advice{};
};

// Each call is logged, may be held up, and may be made to fail. A lane has one thread; two calls
// never work on the same bytes at once; memory that was unmapped is never named; nor is an event
// that was recycled.
class FakeHintDriver final : public HintDriver {
 public:
  ~FakeHintDriver() override {
    CHECK(busy_.empty());
    CHECK_EQUAL(events_.size(), 0U);  // an event that nobody recycled
  }

  EventId record(int device, StreamId stream) noexcept override {
    const std::lock_guard lock(mutex_);
    ++counts_["record"];
    if (fails("record") != 0) return kNoEvent;
    events_[++last_event_] = {device, stream, streams_[{device, stream}].launched};
    return last_event_;
  }
  void recycle(EventId event) noexcept override {
    const std::lock_guard lock(mutex_);
    CHECK_EQUAL(events_.erase(event), 1U);
  }
  int open(Lane lane, int device) noexcept override {
    std::unique_lock lock(mutex_);
    CHECK(!opened_.contains({lane.number, device}));
    const int error = enter({"open", lane, device}, lock);
    if (error == 0) opened_.insert({lane.number, device});
    return error;
  }
  int load(Lane lane, int device) noexcept override {
    std::unique_lock lock(mutex_);
    CHECK(opened_.contains({lane.number, device}));
    return enter({"load", lane, device}, lock);
  }
  void close(Lane lane) noexcept override {
    std::unique_lock lock(mutex_);
    enter({"close", lane}, lock);
    std::erase_if(opened_, [&](const auto& key) { return key.first == lane.number; });
    threads_.erase(lane.number);
  }
  int query(Lane lane, int device, EventId id, bool& finished) noexcept override {
    std::unique_lock lock(mutex_);
    const auto found = events_.find(id);
    CHECK(found != events_.end());
    CHECK_EQUAL(found->second.device, device);
    const Event event = found->second;
    if (const int error = enter({"query", lane, device}, lock)) return error;
    CHECK(events_.contains(id));  // the engine still holds it
    finished = streams_[{event.device, event.stream}].done >= event.mark;
    return 0;
  }
  int prefetch(Lane lane, int device, Range range) noexcept override {
    return work({"prefetch", lane, device, range}, range);
  }
  int evict(Lane lane, int device, Range range) noexcept override {
    return work({"evict", lane, device, range}, range);
  }
  int discard(Lane lane, int device, Range range) noexcept override {
    return work({"discard", lane, device, range}, range);
  }
  int copy(Lane lane, int device, std::uintptr_t to, std::uintptr_t from,
           std::size_t bytes) noexcept override {
    const bool in = lane.direction == Direction::to_device;
    return work({"copy", lane, device, {to, bytes}, from}, {in ? to : from, bytes});
  }
  int advise(Lane lane, int device, Range range, Advice advice) noexcept override {
    return work({"advise", lane, device, range, 0, advice}, range);
  }
  int synchronize(Lane lane, int device) noexcept override {
    std::unique_lock lock(mutex_);
    CHECK(opened_.contains({lane.number, device}));
    const int error = enter({"synchronize", lane, device}, lock);
    busy_.erase(lane.number);
    return error;
  }
  std::string describe(int error) const override {
    if (no_memory_) throw std::bad_alloc();
    return "fake error " + std::to_string(error);
  }

  // ---- what tests say ----

  // Calls of this name wait inside the driver until let_go.
  void hold(const std::string& name) {
    const std::lock_guard lock(mutex_);
    held_names_.insert(name);
  }
  void let_go(const std::string& name) {
    const std::lock_guard lock(mutex_);
    held_names_.erase(name);
    changed_.notify_all();
  }
  // Lets one call through that is held now.
  void let_one_go(const std::string& name) {
    const std::lock_guard lock(mutex_);
    ++passes_[name];
    changed_.notify_all();
  }
  void wait_until_held(const std::string& name, std::size_t calls = 1) {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs),
                            [&] { return held_[name] >= calls; }));
  }
  // The next `times` calls of this name fail with `error`.
  void fail(const std::string& name, int error, int times = 1) {
    const std::lock_guard lock(mutex_);
    times == 0 ? static_cast<void>(failures_.erase(name))
               : static_cast<void>(failures_[name] = {error, times});
  }
  // From now on a worker that describes an error finds no host memory.
  void run_out_of_memory() { no_memory_ = true; }
  // From now on a call on these bytes would be a fault.
  void unmap(Range range) {
    const std::lock_guard lock(mutex_);
    for (const auto& [lane, busy] : busy_) CHECK(!overlap(busy, range));
    unmapped_.push_back(range);
  }
  void map_again(Range range) {
    const std::lock_guard lock(mutex_);
    std::erase(unmapped_, range);
  }
  // This thread trains: record is the only call that it may make.
  void forbid_this_thread() {
    const std::lock_guard lock(mutex_);
    forbidden_.insert(std::this_thread::get_id());
  }
  void launch(int device, StreamId stream) {
    const std::lock_guard lock(mutex_);
    ++streams_[{device, stream}].launched;
  }
  void finish(int device, StreamId stream) {
    const std::lock_guard lock(mutex_);
    Stream& of = streams_[{device, stream}];
    of.done = of.launched;
  }

  // ---- what tests ask ----

  // Calls that move, discard, copy or advise, in the order in which they began.
  std::vector<HintCall> calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::size_t count(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return counts_[name];
  }
  std::size_t events() {
    const std::lock_guard lock(mutex_);
    return events_.size();
  }
  // The most bytes that were ever on their way in one direction.
  std::size_t peak_busy_bytes(Direction direction) {
    const std::lock_guard lock(mutex_);
    return peak_busy_[static_cast<std::size_t>(direction)];
  }
  // 2 MiB blocks that prefetches have brought to the device and evictions have not taken away.
  std::size_t peak_blocks() {
    const std::lock_guard lock(mutex_);
    return peak_blocks_;
  }

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

  int fails(const std::string& name) {
    const auto found = failures_.find(name);
    if (found == failures_.end()) return 0;
    const int error = found->second.first;
    if (--found->second.second == 0) failures_.erase(found);
    return error;
  }

  int enter(const HintCall& call, std::unique_lock<std::mutex>& lock) {
    const std::thread::id thread = std::this_thread::get_id();
    CHECK(!forbidden_.contains(thread));
    CHECK(threads_.try_emplace(call.lane.number, thread).first->second == thread);
    ++counts_[call.name];
    if (held_names_.contains(call.name)) {
      ++held_[call.name];
      changed_.notify_all();
      changed_.wait(lock, [&] {
        return !held_names_.contains(call.name) ||
               (passes_[call.name] != 0 && passes_[call.name]-- != 0);
      });
      --held_[call.name];
    }
    return fails(call.name);
  }

  // The bytes are in use from here to the end of the lane's next synchronize.
  int work(const HintCall& call, Range range) {
    std::unique_lock lock(mutex_);
    CHECK(opened_.contains({call.lane.number, call.device}));
    CHECK(range.bytes != 0);
    for (const Range gone : unmapped_) CHECK(!overlap(gone, range));
    for (const auto& [lane, busy] : busy_)
      CHECK(lane == call.lane.number || !overlap(busy, range));
    busy_[call.lane.number] = range;
    calls_.push_back(call);
    directions_[call.lane.number] = call.lane.direction;
    std::array<std::size_t, kDirections> bytes{};
    for (const auto& [lane, busy] : busy_)
      bytes[static_cast<std::size_t>(directions_[lane])] += busy.bytes;
    for (std::size_t i = 0; i < kDirections; ++i)
      peak_busy_[i] = std::max(peak_busy_[i], bytes[i]);

    const bool comes = call.name == "prefetch";
    if (comes) move(range, true);  // pages fill from the start of the call ...
    const int error = enter(call, lock);
    if (error != 0 && comes) move(range, false);
    if (error == 0 && (call.name == "evict" || call.name == "discard"))
      move(range, false);  // ... and leave by its end
    return error;
  }

  void move(Range range, bool comes) {
    for (std::uintptr_t block = range.address / kPageBytes; block * kPageBytes < end_of(range);
         ++block)
      if (comes)
        resident_.insert(block);
      else
        resident_.erase(block);
    peak_blocks_ = std::max(peak_blocks_, resident_.size());
  }

  std::atomic<bool> no_memory_{false};
  std::mutex mutex_;
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

// An engine over the fake, and shorthand.
class HintMachine {
 public:
  explicit HintMachine(const HintSettings& settings = {})
      : HintMachine(settings, std::make_unique<FakeHintDriver>()) {}

  Ticket ask(HintOp op, Range range, EventId event = 0, int device = 0) {
    return engine.submit({.op = op, .range = range, .device = device, .event = event});
  }
  Ticket prefetch(Range range, EventId event = 0) { return ask(HintOp::prefetch, range, event); }
  Ticket evict(Range range, EventId event = 0) { return ask(HintOp::evict, range, event); }

  void expect(Ticket ticket, Outcome outcome) {
    CHECK(ticket != 0);
    const auto found = engine.wait(ticket, kPatienceNs);
    CHECK(found.has_value());
    const auto name = [](Outcome of) {
      return std::string(kOutcomeNames[static_cast<std::size_t>(of)]);
    };
    CHECK_EQUAL(name(*found), name(outcome));
  }
  // Not over now, nor soon.
  void expect_open(Ticket ticket) {
    CHECK(engine.wait(ticket, kSoonNs) == Outcome::open);
  }
  HintCounts counts(HintOp op, TensorClass tensor_class = TensorClass::other) {
    return engine.statistics().counts[static_cast<std::size_t>(op)]
                                     [static_cast<std::size_t>(tensor_class)];
  }
  std::uint64_t requests(HintOp op, Outcome outcome) {
    return counts(op).requests[static_cast<std::size_t>(outcome)];
  }

 private:
  HintMachine(const HintSettings& settings, std::unique_ptr<FakeHintDriver> owner)
      : driver(*owner), engine(settings, std::move(owner)) {
    driver.forbid_this_thread();
  }

 public:
  FakeHintDriver& driver;
  HintEngine engine;
};

}  // namespace umem
