// One failure, in the call that has its number.
#pragma once

#include <atomic>
#include <cstdint>

namespace umem {

// Counts the calls that a driver may refuse, of all fakes of a machine.
class Faults {
 public:
  // The call with this number from now on fails; none if it is negative. A source of memory throws
  // then, or has no more.
  void fail_at(std::int64_t number, bool throws = false) {
    calls_ = 0;
    number_ = number;
    throws_ = throws;
  }
  std::int64_t calls() const { return calls_; }
  bool throws() const { return throws_; }
  // Called once in each call.
  bool fails() { return calls_++ == number_; }

 private:
  std::atomic<std::int64_t> calls_{0}, number_{-1};
  std::atomic<bool> throws_{false};
};

}  // namespace umem
