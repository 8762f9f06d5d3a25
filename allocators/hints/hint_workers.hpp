// The engine's worker threads, and the state that they share with callers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "core/driver.hpp"
#include "hints/hint_scheduler.hpp"
#include "hints/hint_driver.hpp"
#include "hints/inbox.hpp"

namespace umem {

std::int64_t monotonic_ns() noexcept;

// Lock order: `mutex_` before the inbox's. No driver call is made under either.
class HintWorkers final : public ReleaseListener, public std::enable_shared_from_this<HintWorkers> {
 public:
  HintWorkers(const HintSettings& settings, std::unique_ptr<HintDriver> driver);

  void start(int device);
  Ticket submit(const HintRequest& request);
  TicketSpan submit_batch(HintBatch& batch, StreamId stream, std::span<const Ticket> after);
  void mark_needed(std::vector<Ticket> tickets);
  bool forget(std::span<const Range> ranges, std::int64_t timeout_ns);
  void before_release(std::span<const Range> ranges) noexcept override;
  std::optional<Outcome> ended(Ticket ticket) const noexcept { return scheduler_.ended(ticket); }
  std::optional<Outcome> wait(Ticket ticket, std::int64_t timeout_ns);
  HintStatistics statistics();
  bool shutdown(std::int64_t timeout_ns);
  // Called in a forked child, where the engine must not be used.
  void abandon() noexcept { abandoned_ = true; }

 private:
  enum class State : std::uint8_t { idle, running, stopped };

  // State of one worker, used by its thread only.
  struct WorkerState {
    Lane lane;
    std::set<int> opened;         // devices
    std::size_t wanted_seen = 0;  // of wanted_devices_
  };

  bool started();
  void run(Lane lane) noexcept;
  void work(WorkerState& worker);
  void open_wanted(WorkerState& worker, std::unique_lock<std::mutex>& lock);
  bool poll_events(const WorkerState& worker, std::unique_lock<std::mutex>& lock);
  void issue(WorkerState& worker, const Chunk& chunk, std::unique_lock<std::mutex>& lock);
  void leave(Lane lane);
  CallResult open(WorkerState& worker, int device);
  CallResult perform(WorkerState& worker, const Chunk& chunk);
  CallResult ask(Lane lane, const Chunk& chunk);
  void note(const CallResult& result);

  std::uint64_t read_inbox(bool& news);
  void read_for_workers();
  void bound_unread(std::size_t unread);
  void apply(const Message& message);
  void publish();
  void note_failure(const CallResult& result, const std::string& text);

  const HintSettings settings_;
  const std::unique_ptr<HintDriver> driver_;
  Inbox inbox_;
  std::atomic<State> state_{State::idle};
  std::atomic<std::uint64_t> ended_{0};  // requests, as counted against the inbox's capacity
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<bool> abandoned_{false};

  std::mutex mutex_;
  std::condition_variable changed_;  // a request, a call or a worker has ended
  HintScheduler scheduler_;
  std::uint64_t read_ = 0;  // requests
  std::vector<Message> batch_;
  std::vector<int> wanted_devices_;
  bool polling_ = false;  // one worker at a time polls events, or wakes up to poll
  int running_workers_ = 0;      // threads that have not ended
  std::vector<std::thread> threads_;
};

}  // namespace umem
