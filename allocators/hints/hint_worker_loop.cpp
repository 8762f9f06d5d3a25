// The worker threads of the hint engine, which make the driver calls.
#include <pthread.h>
#include <sys/prctl.h>

#include <cstdio>
#include <exception>

#include "hints/hint_workers.hpp"

namespace umem {
namespace {

// No error of CUDA's has this number.
constexpr int kSwitchedOff = -2;

}  // namespace

void HintWorkers::run(Lane lane) noexcept {
  pthread_setname_np(pthread_self(),
                     lane.direction == Direction::to_host ? "umem-to-host" : "umem-to-device");
  // Event polls are poll_ns apart; by default the kernel wakes sleepers up to 50 us late.
  prctl(PR_SET_TIMERSLACK, 1UL);
  try {
    WorkerState worker{.lane = lane, .opened = {}};
    work(worker);
  } catch (const std::exception& error) {  // out of host memory: training continues without hints
    state_ = State::stopped;
    inbox_.ring();
    std::fprintf(stderr, "umem: hint: the workers end: %s\n", error.what());
  }
  driver_->close(lane);
  try {
    leave(lane);
  } catch (const std::exception&) {  // still out of host memory: open requests stay open
  }
  const std::lock_guard lock(mutex_);
  --running_workers_;
  changed_.notify_all();
}

// After an exception nothing else ends this worker's chunk or the queued requests.
void HintWorkers::leave(Lane lane) {
  const std::lock_guard lock(mutex_);
  scheduler_.give_up(lane, monotonic_ns());
  scheduler_.drop_all(monotonic_ns());
  publish();
}

void HintWorkers::work(WorkerState& worker) {
  std::unique_lock lock(mutex_);
  bool news = false;  // for other workers that may sleep
  while (true) {
    const std::uint64_t rings = read_inbox(news);
    if (state_.load() == State::stopped) return;
    open_wanted(worker, lock);
    news |= poll_events(worker, lock);
    const std::size_t open_before = scheduler_.open_requests();
    std::optional<Chunk> chunk = scheduler_.take(worker.lane, monotonic_ns());
    if (scheduler_.open_requests() != open_before) {  // a request has ended without a call
      news = true;
      publish();
    }
    const bool others_must_ask = chunk && !polling_ && scheduler_.events().anyone_waiting();
    if (others_must_ask || (news && scheduler_.has_work_beside(worker.lane))) inbox_.ring();
    news = false;
    if (chunk) {
      issue(worker, *chunk, lock);
      news = true;  // memory was freed, and requests that waited for the chunk may run
      continue;
    }
    const bool ask = scheduler_.events().anyone_waiting() && !std::exchange(polling_, true);
    lock.unlock();
    inbox_.wait(rings, ask ? settings_.poll_ns : 0);
    lock.lock();
    if (ask) polling_ = false;
  }
}

void HintWorkers::open_wanted(WorkerState& worker, std::unique_lock<std::mutex>& lock) {
  while (worker.wanted_seen < wanted_devices_.size()) {
    const int device = wanted_devices_[worker.wanted_seen++];
    lock.unlock();
    const CallResult result = open(worker, device);
    note(result);
    lock.lock();
  }
}

bool HintWorkers::poll_events(const WorkerState& worker, std::unique_lock<std::mutex>& lock) {
  if (polling_) return false;
  polling_ = true;
  bool fired = false;
  const std::vector<PolledEvent> held = scheduler_.events().hold_next();
  for (const PolledEvent& polled : held) {
    bool finished = false;
    lock.unlock();
    const int error = driver_->query(worker.lane, polled.device, polled.event, finished);
    note({"query", error});
    lock.lock();
    if (finished || error != 0) {
      scheduler_.fire(polled.event, error != 0, monotonic_ns());
      fired = true;
    }
    scheduler_.events().let_go(polled.event);
    publish();
  }
  polling_ = false;
  return fired;
}

void HintWorkers::issue(WorkerState& worker, const Chunk& chunk,
                        std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const CallResult result = perform(worker, chunk);
  note(result);
  lock.lock();
  scheduler_.settle(worker.lane, result, monotonic_ns());
  publish();
  changed_.notify_all();  // forget() waits for calls, even if no request has ended
}

// Without the lock.
void HintWorkers::note(const CallResult& result) {
  if (result.error == 0) return;
  note_failure(result, result.error == kSwitchedOff ? "switched off by UMEM_WITHOUT"
                                                    : driver_->describe(result.error));
}

CallResult HintWorkers::open(WorkerState& worker, int device) {
  if (worker.opened.contains(device)) return {};
  if (const int error = driver_->open(worker.lane, device)) return {"open", error};
  worker.opened.insert(device);
  if (worker.lane.direction == Direction::to_host)
    note({"second_context", settings_.without.second_context
                                ? kSwitchedOff
                                : driver_->separate(worker.lane, device)});
  return {};
}

CallResult HintWorkers::perform(WorkerState& worker, const Chunk& chunk) {
  if (const CallResult opened = open(worker, chunk.device); opened.error != 0) return opened;
  const CallResult asked = ask(worker.lane, chunk);
  // After a failure too: work may be queued on the stream, and forget() relies on it being done.
  const int error = driver_->synchronize(worker.lane, chunk.device);
  return asked.error != 0 ? asked : CallResult{"synchronize", error};
}

CallResult HintWorkers::ask(Lane lane, const Chunk& chunk) {
  const int device = chunk.device;
  const Range range = chunk.range;
  const Without& without = settings_.without;
  switch (chunk.op) {
    case HintOp::prefetch:
      return {"prefetch", without.prefetch ? kSwitchedOff : driver_->prefetch(lane, device, range)};
    case HintOp::evict:
      return {"evict", without.prefetch ? kSwitchedOff : driver_->evict(lane, device, range)};
    case HintOp::advise:
      return {"advise",
              without.advice ? kSwitchedOff : driver_->advise(lane, device, range, chunk.advice)};
  }
  return {};
}

}  // namespace umem
