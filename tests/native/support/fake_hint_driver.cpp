#include "fake_hint_driver.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace umem {

FakeHintDriver::~FakeHintDriver() {
  CHECK(busy_.empty());
  CHECK_EQUAL(events_.size(), 0U);  // an event that nobody recycled
}

EventId FakeHintDriver::record(int device, StreamId stream) noexcept {
  const std::lock_guard lock(mutex_);
  ++counts_["record"];
  if (fails("record") != 0) return kNoEvent;
  events_[++last_event_] = {device, stream, streams_[{device, stream}].launched};
  return last_event_;
}

void FakeHintDriver::recycle(EventId event) noexcept {
  const std::lock_guard lock(mutex_);
  CHECK_EQUAL(events_.erase(event), 1U);
}

int FakeHintDriver::open(Lane lane, int device) noexcept {
  std::unique_lock lock(mutex_);
  CHECK(!opened_.contains({lane.number, device}));
  const int error = enter({"open", lane, device}, lock);
  if (error == 0) opened_.insert({lane.number, device});
  return error;
}

int FakeHintDriver::separate(Lane lane, int device) noexcept {
  std::unique_lock lock(mutex_);
  CHECK(opened_.contains({lane.number, device}));
  return enter({"second_context", lane, device}, lock);
}

void FakeHintDriver::close(Lane lane) noexcept {
  std::unique_lock lock(mutex_);
  enter({"close", lane}, lock);
  std::erase_if(opened_, [&](const auto& key) { return key.first == lane.number; });
  threads_.erase(lane.number);
}

int FakeHintDriver::query(Lane lane, int device, EventId id, bool& finished) noexcept {
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

int FakeHintDriver::synchronize(Lane lane, int device) noexcept {
  std::unique_lock lock(mutex_);
  CHECK(opened_.contains({lane.number, device}));
  const int error = enter({"synchronize", lane, device}, lock);
  busy_.erase(lane.number);
  return error;
}

std::string FakeHintDriver::describe(int error) const {
  if (no_memory_) throw std::bad_alloc();
  return "fake error " + std::to_string(error);
}

void FakeHintDriver::hold(const std::string& name) {
  const std::lock_guard lock(mutex_);
  held_names_.insert(name);
}

void FakeHintDriver::let_go(const std::string& name) {
  const std::lock_guard lock(mutex_);
  held_names_.erase(name);
  changed_.notify_all();
}

void FakeHintDriver::let_one_go(const std::string& name) {
  const std::lock_guard lock(mutex_);
  ++passes_[name];
  changed_.notify_all();
}

void FakeHintDriver::wait_until_held(const std::string& name, std::size_t calls) {
  std::unique_lock lock(mutex_);
  CHECK(changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs),
                          [&] { return held_[name] >= calls; }));
}

void FakeHintDriver::fail(const std::string& name, int error, int times) {
  const std::lock_guard lock(mutex_);
  times == 0 ? static_cast<void>(failures_.erase(name))
             : static_cast<void>(failures_[name] = {error, times});
}

void FakeHintDriver::unmap(Range range) {
  const std::lock_guard lock(mutex_);
  for (const auto& [lane, busy] : busy_) CHECK(!overlap(busy, range));
  unmapped_.push_back(range);
}

void FakeHintDriver::map_again(Range range) {
  const std::lock_guard lock(mutex_);
  for (const Range gone : std::exchange(unmapped_, {})) {
    const Range again = common(gone, range);
    if (again.bytes == 0) {
      unmapped_.push_back(gone);
      continue;
    }
    if (gone.address != again.address)
      unmapped_.push_back({gone.address, again.address - gone.address});
    if (end_of(gone) != end_of(again))
      unmapped_.push_back({end_of(again), end_of(gone) - end_of(again)});
  }
}

void FakeHintDriver::forbid_this_thread() {
  const std::lock_guard lock(mutex_);
  forbidden_.insert(std::this_thread::get_id());
}

void FakeHintDriver::launch(int device, StreamId stream) {
  const std::lock_guard lock(mutex_);
  ++streams_[{device, stream}].launched;
}

void FakeHintDriver::finish(int device, StreamId stream) {
  const std::lock_guard lock(mutex_);
  Stream& of = streams_[{device, stream}];
  of.done = of.launched;
}

std::size_t FakeHintDriver::count(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return counts_[name];
}

int FakeHintDriver::fails(const std::string& name) {
  if (faults_.fails()) return error_;
  const auto found = failures_.find(name);
  if (found == failures_.end()) return 0;
  const int error = found->second.first;
  if (--found->second.second == 0) failures_.erase(found);
  return error;
}

int FakeHintDriver::enter(const HintCall& call, std::unique_lock<std::mutex>& lock) {
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

int FakeHintDriver::work(const HintCall& call) {
  const Range range = call.range;
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
    bytes[number_of(directions_[lane])] += busy.bytes;
  for (std::size_t i = 0; i < kDirections; ++i)
    peak_busy_[i] = std::max(peak_busy_[i], bytes[i]);

  const bool comes = call.name == "prefetch";
  if (comes) move(range, true);  // pages fill from the start of the call ...
  const int error = enter(call, lock);
  if (error != 0 && comes) move(range, false);
  if (error == 0 && call.name == "evict") move(range, false);  // ... and leave by its end
  return error;
}

void FakeHintDriver::move(Range range, bool comes) {
  for (std::uintptr_t block = range.address / kPageBytes; block * kPageBytes < end_of(range);
       ++block)
    if (comes)
      resident_.insert(block);
    else
      resident_.erase(block);
  peak_blocks_ = std::max(peak_blocks_, resident_.size());
}

std::array<std::uint64_t, kOutcomes> expect_balanced(const HintStatistics& stats,
                                                     std::uint64_t accepted, std::uint64_t refused,
                                                     std::uint64_t asked_bytes) {
  std::array<std::uint64_t, kOutcomes> outcomes{};
  HintCounts sum;
  for (const auto& of_op : stats.counts)
    for (const HintCounts& counts : of_op) {
      for (std::size_t i = 0; i < kOutcomes; ++i) outcomes[i] += counts.requests[i];
      sum.asked_bytes += counts.asked_bytes;
      sum.moved_bytes += counts.moved_bytes;
      sum.wasted_bytes += counts.wasted_bytes;
    }
  std::uint64_t ended = 0;
  for (std::size_t i = 1; i < kOutcomes; ++i) ended += outcomes[i];
  CHECK_EQUAL(outcomes[0], 0U);
  CHECK_EQUAL(ended, accepted);
  CHECK_EQUAL(stats.refused, refused);
  CHECK_EQUAL(sum.asked_bytes, asked_bytes);
  CHECK_EQUAL(sum.moved_bytes + sum.wasted_bytes, asked_bytes);
  CHECK_EQUAL(stats.open_requests, 0U);
  CHECK_EQUAL(stats.queued_bytes, 0U);
  return outcomes;
}

HintMachine::HintMachine(const HintSettings& settings)
    : HintMachine(settings, std::make_unique<FakeHintDriver>()) {}

HintMachine::HintMachine(const HintSettings& settings, std::unique_ptr<FakeHintDriver> owner)
    : driver(*owner), engine(settings, std::move(owner)) {
  driver.forbid_this_thread();
}

Ticket HintMachine::ask(HintOp op, Range range, int device) {
  return engine.submit({.op = op, .range = range, .device = device});
}

Ticket HintMachine::ask_behind(HintOp op, Range range, StreamId stream, int device, Ticket after) {
  HintBatch batch(device, {{.op = op, .range = range}});
  return engine.submit_batch(batch, stream, std::vector<Ticket>{after}).last;
}

Ticket HintMachine::hold(HintOp op, Range range) {
  const std::string name = op == HintOp::prefetch ? "prefetch" : "evict";
  driver.hold(name);
  const Ticket ticket = ask(op, range);
  driver.wait_until_held(name);
  return ticket;
}

void HintMachine::expect(Ticket ticket, Outcome outcome) {
  CHECK(ticket != 0);
  const auto found = engine.wait(ticket, kPatienceNs);
  CHECK(found.has_value());
  const auto name = [](Outcome of) {
    return std::string(kOutcomeNames[number_of(of)]);
  };
  CHECK_EQUAL(name(*found), name(outcome));
}

void HintMachine::expect_open(Ticket ticket) {
  CHECK(engine.wait(ticket, kSoonNs) == Outcome::open);
}

HintCounts HintMachine::counts(HintOp op, TensorClass tensor_class) {
  return engine.statistics().counts[number_of(op)]
                                   [number_of(tensor_class)];
}

std::uint64_t HintMachine::requests(HintOp op, Outcome outcome) {
  return counts(op).requests[number_of(outcome)];
}

}  // namespace umem
