// The message queue from callers to workers, and the condition variable that wakes workers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "hints/hint_batch.hpp"
#include "hints/request.hpp"

namespace umem {

// A request, or tickets that are needed now.
struct Message {
  Ticket ticket = 0;  // of the request; 0 for none
  HintRequest request{};
  std::vector<Ticket> needed{};
  std::int64_t now_ns = 0;
};

// A caller holds the inbox's lock for one append only: it never waits for a worker's search or for
// a driver call.
class Inbox {
 public:
  // Returns the number of unread messages. Needed tickets wake no worker: they are read before the
  // next request.
  std::size_t put(Message message) {
    const std::lock_guard lock(mutex_);
    unread_ += 1 + message.needed.size();
    messages_.push_back(std::move(message));
    return unread_;
  }

  // Assigns a ticket to the request; 0 if `capacity` requests are open already.
  Ticket submit(Message message, std::uint64_t ended, std::size_t capacity, std::size_t& unread) {
    std::unique_lock lock(mutex_);
    if (last_ticket_ - ended >= capacity) return 0;
    const Ticket ticket = message.ticket = ++last_ticket_;
    messages_.push_back(std::move(message));
    unread = ++unread_;
    wake_one(lock);
    return ticket;
  }

  // Assigns tickets to the requests with an address, up to the capacity. All wait for `event`,
  // recorded on `stream`. No worker reads a part of them without the rest. `after` is empty, or has
  // as many entries as `requests`.
  TicketSpan submit_all(const std::vector<HintRequest>& requests, std::span<const Ticket> after,
                        EventId event, StreamId stream, std::int64_t now_ns, std::uint64_t ended,
                        std::size_t capacity, std::size_t& unread) {
    std::unique_lock lock(mutex_);
    const std::size_t before = messages_.size();
    TicketSpan span{.first = last_ticket_ + 1, .last = last_ticket_};
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].range.address == 0) continue;
      if (last_ticket_ - ended >= capacity) break;
      span.last = ++last_ticket_;
      Message& submitted = messages_.emplace_back();
      submitted.ticket = last_ticket_;
      submitted.request = requests[i];
      submitted.request.event = event;
      submitted.request.stream = stream;
      if (!after.empty()) submitted.request.after = after[i];
      submitted.now_ns = now_ns;
    }
    unread = unread_ += messages_.size() - before;
    wake_one(lock);
    return span;
  }

  // Moves the messages since the last call into `messages`, in order. Returns the number to pass
  // to wait().
  std::uint64_t take(std::vector<Message>& messages) {
    messages.clear();
    const std::lock_guard lock(mutex_);
    messages_.swap(messages);
    unread_ = 0;
    waking_ = false;
    return rings_;
  }

  // Wakes all workers.
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      ++rings_;
    }
    bell_.notify_all();
  }

  // Waits for a ring after take() returned `rings`, or for `at_most_ns` if that is not 0.
  void wait(std::uint64_t rings, std::int64_t at_most_ns) {
    std::unique_lock lock(mutex_);
    ++sleepers_;
    const auto rung = [&] { return rings_ != rings; };
    if (at_most_ns == 0)
      bell_.wait(lock, rung);
    else
      bell_.wait_for(lock, std::chrono::nanoseconds(at_most_ns), rung);
    --sleepers_;
  }

 private:
  // Unlocks before it wakes a thread that needs the lock.
  void wake_one(std::unique_lock<std::mutex>& lock) {
    ++rings_;
    const bool wake = sleepers_ != 0 && !std::exchange(waking_, true);
    lock.unlock();
    if (wake) bell_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable bell_;
  std::vector<Message> messages_;
  std::size_t unread_ = 0;  // messages, and the needed tickets in them
  Ticket last_ticket_ = 0;
  std::uint64_t rings_ = 0;
  int sleepers_ = 0;
  bool waking_ = false;
};

}  // namespace umem
