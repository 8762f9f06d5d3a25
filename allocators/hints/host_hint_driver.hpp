// The hint engine over host memory: its tests and demonstrations run it where there is no GPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "hints/hint_driver.hpp"

namespace umem {

// Pages are where they are, streams do their work at once, and copies copy. Each move takes as long
// as a link of `bytes_per_s` would, 0 for no time.
class HostHintDriver final : public HintDriver {
 public:
  HostHintDriver(int devices, double bytes_per_s)
      : devices_(devices), bytes_per_s_(bytes_per_s) {}

  EventId record(int device, StreamId) noexcept override {
    return device < devices_ ? ++last_event_ : kNoEvent;
  }
  void recycle(EventId) noexcept override {}
  int open(Lane, int device) noexcept override { return device < devices_ ? 0 : kNoSuchDevice; }
  void close(Lane) noexcept override {}
  int query(Lane, int, EventId, bool& finished) noexcept override {
    finished = true;
    return 0;
  }
  int prefetch(Lane, int, Range range) noexcept override { return move(range.bytes); }
  int evict(Lane, int, Range range) noexcept override { return move(range.bytes); }
  int discard(Lane, int, Range) noexcept override { return 0; }
  int copy(Lane, int, std::uintptr_t to, std::uintptr_t from,
           std::size_t bytes) noexcept override {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return move(bytes);
  }
  int advise(Lane, int, Range, Advice) noexcept override { return 0; }
  int synchronize(Lane, int) noexcept override { return 0; }
  std::string describe(int error) const override {
    return error == kNoSuchDevice ? "no such device" : "unknown error";
  }

 private:
  static constexpr int kNoSuchDevice = 1;

  int move(std::size_t bytes) const noexcept {
    if (bytes_per_s_ > 0)
      std::this_thread::sleep_for(
          std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_s_));
    return 0;
  }

  const int devices_;
  const double bytes_per_s_;
  std::atomic<EventId> last_event_{0};
};

}  // namespace umem
