// A hint driver over host memory, for tests and demonstrations without a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "hints/hint_driver.hpp"

namespace umem {

// Pages do not move, and streams complete their work at once. Moves take the time of a link with `bytes_per_s` in each direction (0: no time), shared by the workers of the direction.
// `fail` maps the name of a call to the number, from 1 on, of the call that fails.
class HostHintDriver final : public HintDriver {
 public:
  // Throws std::invalid_argument for an unknown call, and for a number below 1.
  HostHintDriver(int devices, double bytes_per_s,
                 const std::map<std::string, std::int64_t>& fail = {})
      : devices_(devices), bytes_per_s_(bytes_per_s) {
    for (const auto& [name, number] : fail) {
      const auto* const found = std::find(kCallNames.begin(), kCallNames.end(), name);
      if (found == kCallNames.end()) throw std::invalid_argument("fail: no such call: " + name);
      if (number < 1) throw std::invalid_argument("fail: calls are numbered from 1: " + name);
      until_failure_[static_cast<std::size_t>(found - kCallNames.begin())] = number;
    }
  }

  EventId record(int device, StreamId) noexcept override {
    return device >= devices_ || result_of(Call::record) != 0 ? kNoEvent : ++last_event_;
  }
  void recycle(EventId) noexcept override {}
  int open(Lane, int device) noexcept override {
    return device < devices_ ? result_of(Call::open) : kNoSuchDevice;
  }
  int separate(Lane, int) noexcept override { return result_of(Call::second_context); }
  void close(Lane) noexcept override {}
  int query(Lane, int, EventId, bool& finished) noexcept override {
    finished = true;
    return result_of(Call::query);
  }
  int prefetch(Lane lane, int, Range range) noexcept override {
    return move(Call::prefetch, lane, range.bytes);
  }
  int evict(Lane lane, int, Range range) noexcept override {
    return move(Call::evict, lane, range.bytes);
  }
  int advise(Lane, int, Range, Advice) noexcept override { return result_of(Call::advise); }
  int synchronize(Lane, int) noexcept override { return result_of(Call::synchronize); }
  std::string describe(int error) const override {
    return error == kNoSuchDevice ? "no such device" : "asked to fail";
  }

 private:
  static constexpr int kNoSuchDevice = 1;
  static constexpr int kAskedToFail = 2;

  enum class Call : std::uint8_t {
    record, open, second_context, query, prefetch, evict, advise, synchronize
  };
  static constexpr std::array<const char*, 8> kCallNames = {
      "record", "open", "second_context", "query", "prefetch", "evict", "advise", "synchronize"};

  using Clock = std::chrono::steady_clock;
  struct Link {
    std::mutex mutex;
    Clock::time_point free{};  // when all queued moves are done
  };

  int result_of(Call call) noexcept {
    return until_failure_[static_cast<std::size_t>(call)].fetch_sub(1) == 1 ? kAskedToFail : 0;
  }

  int move(Call call, Lane lane, std::size_t bytes) noexcept {
    if (const int error = result_of(call)) return error;
    if (bytes_per_s_ <= 0) return 0;
    const std::chrono::duration<double> takes(static_cast<double>(bytes) / bytes_per_s_);
    Link& link = links_[index_of(lane.direction)];
    std::unique_lock lock(link.mutex);
    link.free =
        std::max(link.free, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    const Clock::time_point done = link.free;
    lock.unlock();
    std::this_thread::sleep_until(done);
    return 0;
  }

  const int devices_;
  const double bytes_per_s_;
  std::atomic<EventId> last_event_{0};
  std::array<std::atomic<std::int64_t>, kCallNames.size()> until_failure_{};
  std::array<Link, kDirections> links_;
};

}  // namespace umem
