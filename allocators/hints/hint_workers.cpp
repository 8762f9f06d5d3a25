#include "hints/hint_workers.hpp"

#include <chrono>
#include <cstdio>
#include <exception>
#include <system_error>

#include "core/signals_blocked.hpp"

namespace umem {
namespace {

// Beyond this many unread messages per open request, the caller processes them itself.
constexpr std::size_t kUnreadPerRequest = 4;
// How long a release of memory waits for a driver call on it.
constexpr std::int64_t kReleasePatienceNs = 10'000'000'000;

}  // namespace

std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

HintWorkers::HintWorkers(const HintSettings& settings, std::unique_ptr<HintDriver> driver)
    : settings_(settings),
      driver_(std::move(driver)),
      scheduler_(settings, settings.prefetch_workers + 1) {}

// ---- callers ----

bool HintWorkers::started() {
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
      ++running_workers_;
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

void HintWorkers::start(int device) {
  {
    const std::lock_guard lock(mutex_);
    wanted_devices_.push_back(device);
  }
  if (started()) inbox_.ring();
}

Ticket HintWorkers::submit(const HintRequest& request) {
  Ticket ticket = 0;
  std::size_t unread = 0;
  if (started())
    ticket = inbox_.submit({.request = request, .now_ns = monotonic_ns()}, ended_.load(),
                           settings_.capacity, unread);
  if (ticket == 0) ++refused_;
  bound_unread(unread);
  return ticket;
}

TicketSpan HintWorkers::submit_batch(HintBatch& batch, StreamId stream,
                                     std::span<const Ticket> after) {
  return batch.submit_with([&](const std::vector<HintRequest>& requests) {
    const std::uint64_t wanted = batch.wanted();
    TicketSpan span;
    if (wanted != 0 && started()) {
      const int device = batch.device();
      const EventId event = driver_->record(device, stream);
      if (event == kNoEvent) note_failure({"record", -1}, "no event can be had now");
      std::size_t unread = 0;
      span = inbox_.submit_all(requests, after, event, stream, monotonic_ns(), ended_.load(),
                               settings_.capacity, unread);
      if (span.last < span.first && event != kNoEvent) driver_->recycle(event);
      bound_unread(unread);
    }
    refused_ += wanted - (span.last + 1 - span.first);
    return span;
  });
}

void HintWorkers::mark_needed(std::vector<Ticket> tickets) {
  bound_unread(inbox_.put({.needed = std::move(tickets), .now_ns = monotonic_ns()}));
}

void HintWorkers::bound_unread(std::size_t unread) {
  if (unread <= kUnreadPerRequest * settings_.capacity) return;
  const std::lock_guard lock(mutex_);
  read_for_workers();
}

void HintWorkers::before_release(std::span<const Range> ranges) noexcept {
  if (abandoned_.load()) return;
  try {
    // After a timeout the driver's own release still waits for its calls.
    forget(ranges, kReleasePatienceNs);
  } catch (const std::exception&) {  // out of host memory
  }
}

// Drops all before the wait, so that no worker starts one while another is waited for.
bool HintWorkers::forget(std::span<const Range> ranges, std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const auto drop = [&] {
    for (const Range range : ranges) scheduler_.forget(range, monotonic_ns());
    publish();
  };
  read_for_workers();
  drop();
  const bool quiet =
      changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] {
        return std::none_of(ranges.begin(), ranges.end(),
                            [&](Range range) { return scheduler_.in_flight(range); });
      });
  drop();         // requests submitted meanwhile
  inbox_.ring();  // requests that waited for the ranges, or for their memory
  return quiet;
}

std::optional<Outcome> HintWorkers::wait(Ticket ticket, std::int64_t timeout_ns) {
  if (const auto outcome = ended(ticket)) return outcome;
  std::unique_lock lock(mutex_);
  read_for_workers();
  const HintRecord* record = nullptr;
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] {
    record = scheduler_.find(ticket);
    return record == nullptr || record->done_ns != 0;
  });
  record = scheduler_.find(ticket);
  if (record == nullptr) return std::nullopt;
  return record->done_ns == 0 ? Outcome::open : record->outcome;
}

HintStatistics HintWorkers::statistics() {
  const std::lock_guard lock(mutex_);
  read_for_workers();
  HintStatistics stats = scheduler_.statistics();
  stats.refused = refused_.load();
  return stats;
}

bool HintWorkers::shutdown(std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  state_ = State::stopped;
  read_for_workers();
  scheduler_.drop_all(monotonic_ns());
  publish();
  inbox_.ring();
  const bool ended = changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                       [&] { return running_workers_ == 0; });
  std::vector<std::thread> threads = std::move(threads_);
  threads_.clear();
  lock.unlock();
  for (std::thread& thread : threads) ended ? thread.join() : thread.detach();
  return ended;
}

// ---- under the lock ----

std::uint64_t HintWorkers::read_inbox(bool& news) {
  const std::uint64_t rings = inbox_.take(batch_);
  if (batch_.empty()) return rings;
  news = true;
  for (const Message& message : batch_) apply(message);
  // A request accepted just before the end.
  if (state_.load() == State::stopped) scheduler_.drop_all(monotonic_ns());
  publish();
  return rings;
}

// The worker that the message woke will find the inbox empty.
void HintWorkers::read_for_workers() {
  bool news = false;
  read_inbox(news);
  if (news) inbox_.ring();
}

void HintWorkers::apply(const Message& message) {
  for (const Ticket ticket : message.needed) scheduler_.mark_needed(ticket, message.now_ns);
  if (message.ticket == 0) return;
  ++read_;
  scheduler_.add(message.ticket, message.request, message.now_ns);
}

// Updates the inbox's count of open requests, and wakes waiting threads if requests have ended. The
// training thread may be one of them, so it is woken only then.
void HintWorkers::publish() {
  for (const EventId event : scheduler_.events().take_recycled()) driver_->recycle(event);
  const std::uint64_t ended = read_ - scheduler_.open_requests();
  if (ended_.exchange(ended) != ended) changed_.notify_all();
}

// Called without the lock, because stderr may block.
void HintWorkers::note_failure(const CallResult& result, const std::string& text) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = scheduler_.count_failure(result, text);
  }
  if (first)
    std::fprintf(stderr,
                 "umem: hint: %s failed: %s (%d). Training goes on without it; further ones like "
                 "it are only counted.\n",
                 result.call, text.c_str(), result.error);
}

}  // namespace umem
