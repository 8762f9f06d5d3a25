#include "hints/hint_crew.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <system_error>

namespace umem {
namespace {

// Past this many unread messages for each request that may be open, a caller reads them itself.
constexpr std::size_t kUnreadPerRequest = 4;

// The host's pages: a discard may not touch what shares a page with the range.
Range whole_pages(Range range) {
  static const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = round_up(range.address, page_bytes);
  const std::uintptr_t end = end_of(range) / page_bytes * page_bytes;
  return {start, end > start ? end - start : 0};
}

// Signals are for the program's own threads: Python handles them in its main one.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

HintCrew::HintCrew(const HintSettings& settings, std::unique_ptr<HintDriver> driver)
    : settings_(settings),
      driver_(std::move(driver)),
      book_(settings, settings.prefetch_workers + 1) {}

// ---- callers ----

bool HintCrew::started() {
  if (const State state = state_.load(); state != State::idle) return state == State::running;
  std::unique_lock lock(mutex_);
  if (const State state = state_.load(); state != State::idle) return state == State::running;
  try {
    const SignalsBlocked blocked;
    for (int number = 0; number <= settings_.prefetch_workers; ++number) {
      const Lane lane{number < settings_.prefetch_workers ? Direction::to_device
                                                          : Direction::to_host,
                      number};
      threads_.emplace_back([self = shared_from_this(), lane] { self->run(lane); });
      ++workers_;
    }
    state_ = State::running;
  } catch (const std::system_error& error) {
    state_ = State::stopped;
    inbox_.ring();
    lock.unlock();
    note_failure({"thread", error.code().value()}, error.what());
  }
  return state_.load() == State::running;
}

void HintCrew::start(int device) {
  {
    const std::lock_guard lock(mutex_);
    wanted_devices_.push_back(device);
  }
  if (started()) inbox_.ring();
}

Ticket HintCrew::submit(const HintRequest& request) {
  Ticket ticket = 0;
  std::size_t unread = 0;
  if (started())
    ticket = inbox_.submit(
        {.kind = Message::Kind::submit, .request = request, .now_ns = monotonic_ns()},
        ended_.load(), settings_.capacity, unread);
  if (ticket == 0)
    ++refused_;
  else if (unread > kUnreadPerRequest * settings_.capacity) {
    const std::lock_guard lock(mutex_);
    read_for_workers();
  }
  return ticket;
}

void HintCrew::tell(const Message& message) {
  if (inbox_.put(message) <= kUnreadPerRequest * settings_.capacity) return;
  const std::lock_guard lock(mutex_);
  read_for_workers();
}

EventId HintCrew::record(int device, StreamId stream) {
  if (state_.load() == State::stopped) return kNoEvent;
  const EventId event = driver_->record(device, stream);
  if (event == kNoEvent)
    note_failure({"record", -1}, "no event can be had now");
  else
    tell({.kind = Message::Kind::recorded,
          .request = {.device = device, .event = event},
          .stream = stream});
  return event;
}

bool HintCrew::forget(Range range, std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  read_for_workers();
  book_.forget(range, monotonic_ns());
  publish();
  const bool quiet =
      changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                        [&] { return !book_.in_flight(range); });
  book_.forget(range, monotonic_ns());  // the call that has just ended left the range resident
  publish();
  inbox_.ring();  // what waited behind the range, or for its room
  return quiet;
}

std::optional<Outcome> HintCrew::wait(Ticket ticket, std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  read_for_workers();
  const HintRecord* record = nullptr;
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] {
    record = book_.find(ticket);
    return record == nullptr || record->done_ns != 0;
  });
  record = book_.find(ticket);
  if (record == nullptr) return std::nullopt;
  return record->done_ns == 0 ? Outcome::open : record->outcome;
}

std::optional<HintRecord> HintCrew::find(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  read_for_workers();
  const HintRecord* record = book_.find(ticket);
  return record == nullptr ? std::nullopt : std::optional(*record);
}

HintStatistics HintCrew::statistics() {
  const std::lock_guard lock(mutex_);
  read_for_workers();
  HintStatistics stats = book_.statistics();
  stats.refused = refused_.load();
  return stats;
}

bool HintCrew::shutdown(std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  state_ = State::stopped;
  read_for_workers();
  book_.drop_all(monotonic_ns());
  publish();
  inbox_.ring();
  const bool ended = changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                       [&] { return workers_ == 0; });
  std::vector<std::thread> threads = std::move(threads_);
  threads_.clear();
  lock.unlock();
  for (std::thread& thread : threads) ended ? thread.join() : thread.detach();
  return ended;
}

// ---- the books, under the lock ----

std::uint64_t HintCrew::read_inbox(bool& news) {
  const std::uint64_t rings = inbox_.take(batch_);
  if (batch_.empty()) return rings;
  news = true;
  for (const Message& message : batch_) apply(message);
  // One that was let in just before the end.
  if (state_.load() == State::stopped) book_.drop_all(monotonic_ns());
  publish();
  return rings;
}

// The worker whom the message woke will find the inbox empty.
void HintCrew::read_for_workers() {
  bool news = false;
  read_inbox(news);
  if (news) inbox_.ring();
}

void HintCrew::apply(const Message& message) {
  const HintRequest& request = message.request;
  switch (message.kind) {
    case Message::Kind::submit:
      ++read_;
      return book_.add(message.ticket, request, message.now_ns);
    case Message::Kind::needed:
      return book_.mark_needed(message.ticket, message.now_ns);
    case Message::Kind::recorded:
      return book_.events().recorded(request.event, request.device, message.stream);
    case Message::Kind::release:
      return book_.events().release(request.event);
    case Message::Kind::budget:
      return book_.set_budget(request.device, request.range.bytes);
    case Message::Kind::resident:
    case Message::Kind::absent:
      return book_.set_resident(request.device, request.range,
                                message.kind == Message::Kind::resident);
  }
}

// Tells those who wait for an end, and the inbox how much room there is.
void HintCrew::publish() {
  ended_ = read_ - book_.open_requests();
  for (const EventId event : book_.events().take_recycled()) driver_->recycle(event);
  changed_.notify_all();
}

// Without the lock: stderr may block.
void HintCrew::note_failure(const CallResult& result, const std::string& text) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = book_.count_failure(result, text);
  }
  if (first)
    std::fprintf(stderr,
                 "umem: hint: %s failed: %s (%d). Training goes on without it; further ones like "
                 "it are only counted.\n",
                 result.call, text.c_str(), result.error);
}

// ---- workers ----

void HintCrew::run(Lane lane) noexcept {
  pthread_setname_np(pthread_self(),
                     lane.direction == Direction::to_host ? "umem-to-host" : "umem-to-device");
  try {
    Desk desk{.lane = lane, .opened = {}};
    work(desk);
  } catch (const std::exception& error) {  // out of host memory: training goes on, hints do not
    state_ = State::stopped;
    inbox_.ring();
    std::fprintf(stderr, "umem: hint: the workers end: %s\n", error.what());
  }
  driver_->close(lane);
  const std::lock_guard lock(mutex_);
  --workers_;
  changed_.notify_all();
}

void HintCrew::work(Desk& desk) {
  std::unique_lock lock(mutex_);
  bool news = false;  // that may concern other workers, who sleep
  while (true) {
    const std::uint64_t rings = read_inbox(news);
    if (state_.load() == State::stopped) return;
    open_wanted(desk, lock);
    news |= ask_about_events(desk, lock);
    std::optional<Chunk> chunk = book_.take(desk.lane, monotonic_ns());
    const bool others_must_ask = chunk && !asking_ && book_.events().anyone_waiting();
    if (others_must_ask || (news && book_.has_work_beside(desk.lane))) inbox_.ring();
    news = false;
    if (chunk) {
      issue(desk, std::move(*chunk), lock);
      news = true;  // there is room, and what waited behind the chunk may go
      continue;
    }
    publish();  // a request may have ended without a call
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
  }
}

CallResult HintCrew::open(Desk& desk, int device) noexcept {
  if (desk.opened.contains(device)) return {};
  const int error = driver_->open(desk.lane, device);
  if (error == 0) desk.opened.insert(device);
  return {"open", error};
}

CallResult HintCrew::perform(Desk& desk, const Chunk& chunk) noexcept {
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
      return {"copy", driver_->copy(lane, device, range.address, chunk.host_address, range.bytes)};
    case HintOp::copy_out:
      return {"copy", driver_->copy(lane, device, chunk.host_address, range.address, range.bytes)};
    case HintOp::advise:
      return {"advise", driver_->advise(lane, device, range, chunk.advice)};
  }
  return {};
}

}  // namespace umem
