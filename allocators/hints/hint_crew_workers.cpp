// The half of the crew that runs in threads of its own: workers, who make the driver calls.
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "hints/hint_crew.hpp"

namespace umem {
namespace {

// The host's pages: a discard may not touch what shares a page with the range.
Range whole_pages(Range range) {
  static const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = round_up(range.address, page_bytes);
  const std::uintptr_t end = end_of(range) / page_bytes * page_bytes;
  return {start, end > start ? end - start : 0};
}

}  // namespace

void HintCrew::run(Lane lane) noexcept {
  pthread_setname_np(pthread_self(),
                     lane.direction == Direction::to_host ? "umem-to-host" : "umem-to-device");
  // Looks at events are to be poll_ns apart: by default the kernel wakes sleepers 50 us late.
  prctl(PR_SET_TIMERSLACK, 1UL);
  try {
    Desk desk{.lane = lane, .opened = {}};
    work(desk);
  } catch (const std::exception& error) {  // out of host memory: training goes on, hints do not
    state_ = State::stopped;
    inbox_.ring();
    std::fprintf(stderr, "umem: hint: the workers end: %s\n", error.what());
  }
  driver_->close(lane);
  try {
    leave(lane);
  } catch (const std::exception&) {  // still out of host memory: what is open stays so
  }
  const std::lock_guard lock(mutex_);
  --workers_;
  changed_.notify_all();
}

// After an exception nobody else ends what this worker had taken, nor what is queued.
void HintCrew::leave(Lane lane) {
  const std::lock_guard lock(mutex_);
  book_.give_up(lane, monotonic_ns());
  book_.drop_all(monotonic_ns());
  publish();
}

void HintCrew::work(Desk& desk) {
  std::unique_lock lock(mutex_);
  bool news = false;  // that may concern other workers, who sleep
  while (true) {
    const std::uint64_t rings = read_inbox(news);
    if (state_.load() == State::stopped) return;
    open_wanted(desk, lock);
    news |= ask_about_events(desk, lock);
    const std::size_t open_before = book_.open_requests();
    std::optional<Chunk> chunk = book_.take(desk.lane, monotonic_ns());
    if (book_.open_requests() != open_before) {  // one has ended without a call
      news = true;
      publish();
    }
    const bool others_must_ask = chunk && !asking_ && book_.events().anyone_waiting();
    if (others_must_ask || (news && book_.has_work_beside(desk.lane))) inbox_.ring();
    news = false;
    if (chunk) {
      issue(desk, std::move(*chunk), lock);
      news = true;  // there is room, and what waited behind the chunk may go
      continue;
    }
    const bool ask = book_.events().anyone_waiting() && !std::exchange(asking_, true);
    lock.unlock();
    inbox_.wait(rings, ask ? settings_.poll_ns : 0);
    lock.lock();
    if (ask) asking_ = false;
  }
}

void HintCrew::open_wanted(Desk& desk, std::unique_lock<std::mutex>& lock) {
  while (desk.wanted_seen < wanted_devices_.size()) {
    const int device = wanted_devices_[desk.wanted_seen++];
    lock.unlock();
    const CallResult result = open(desk, device);
    if (result.error != 0) note_failure(result, driver_->describe(result.error));
    lock.lock();
  }
}

bool HintCrew::ask_about_events(const Desk& desk, std::unique_lock<std::mutex>& lock) {
  if (asking_) return false;
  asking_ = true;
  bool fired = false;
  const std::vector<PolledEvent> held = book_.events().hold_next();
  for (const PolledEvent& polled : held) {
    bool finished = false;
    lock.unlock();
    const int error = driver_->query(desk.lane, polled.device, polled.event, finished);
    if (error != 0) note_failure({"query", error}, driver_->describe(error));
    lock.lock();
    if (finished || error != 0) {
      book_.fire(polled.event, error != 0, monotonic_ns());
      fired = true;
    }
    book_.events().let_go(polled.event);
    publish();
  }
  asking_ = false;
  return fired;
}

void HintCrew::issue(Desk& desk, Chunk first, std::unique_lock<std::mutex>& lock) {
  std::optional<Chunk> chunk = std::move(first);
  while (chunk) {
    lock.unlock();
    const CallResult result = perform(desk, *chunk);
    if (result.error != 0) note_failure(result, driver_->describe(result.error));
    lock.lock();
    chunk = book_.settle(desk.lane, result, monotonic_ns());
    publish();
    changed_.notify_all();  // forget() waits for calls, whether or not a request has ended
  }
}

CallResult HintCrew::open(Desk& desk, int device) {
  if (desk.opened.contains(device)) return {};
  if (const int error = driver_->open(desk.lane, device)) return {"open", error};
  desk.opened.insert(device);
  // Without its kernel the driver copies in another way.
  if (const int error = driver_->load(desk.lane, device))
    note_failure({"load", error}, driver_->describe(error));
  return {};
}

CallResult HintCrew::perform(Desk& desk, const Chunk& chunk) {
  if (const CallResult opened = open(desk, chunk.device); opened.error != 0) return opened;
  const CallResult asked = ask(desk.lane, chunk);
  // After a failure too: something may have been asked for, and forget() relies on it being over.
  const int error = driver_->synchronize(desk.lane, chunk.device);
  return asked.error != 0 ? asked : CallResult{"synchronize", error};
}

CallResult HintCrew::ask(Lane lane, const Chunk& chunk) noexcept {
  const int device = chunk.device;
  const Range range = chunk.range;
  switch (chunk.op) {
    case HintOp::prefetch:
      return {"prefetch", driver_->prefetch(lane, device, range)};
    case HintOp::evict:
      return {"evict", driver_->evict(lane, device, range)};
    case HintOp::discard: {
      const Range pages = whole_pages(range);
      return {"discard", pages.bytes == 0 ? 0 : driver_->discard(lane, device, pages)};
    }
    case HintOp::copy_in:
      // The copy would fault on pages that are not there.
      if (const int error = driver_->prefetch(lane, device, range)) return {"prefetch", error};
      return {"copy", driver_->copy(lane, device, range.address, chunk.host.address, range.bytes)};
    case HintOp::copy_out:
      return {"copy", driver_->copy(lane, device, chunk.host.address, range.address, range.bytes)};
    case HintOp::advise:
      return {"advise", driver_->advise(lane, device, range, chunk.advice)};
  }
  return {};
}

}  // namespace umem
