#include "core/copy_gate.hpp"

namespace umem {

CopyGate::~CopyGate() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  opener_.join();
  set(0);
}

void CopyGate::enter() {
  {
    const std::lock_guard lock(mutex_);
    if (++inside_ != 1) return;
    ++times_;
    set(1);
  }
  changed_.notify_one();
}

void CopyGate::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (--inside_ != 0) return;
    set(0);
  }
  changed_.notify_one();
}

void CopyGate::open_at_limit() {
  std::unique_lock lock(mutex_);
  std::uint64_t opened = 0;  // the time at which the limit was reached
  for (;;) {
    changed_.wait(lock, [&] { return ends_ || (inside_ != 0 && times_ != opened); });
    if (ends_) return;
    const std::uint64_t time = times_;
    const auto is_over = [&] { return ends_ || inside_ == 0 || times_ != time; };
    if (changed_.wait_for(lock, limit_, is_over)) continue;
    set(0);
    opened = time;
  }
}

}  // namespace umem
