// What the fakes share: threads of a test call them at once.
#pragma once

#include <mutex>

namespace umem {

class Locked {
 protected:
  template <class Value>
  Value read(const Value& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }
  template <class Value>
  void set(Value& value, const Value& to) {
    const std::lock_guard lock(mutex_);
    value = to;
  }
  mutable std::mutex mutex_;
};

}  // namespace umem
