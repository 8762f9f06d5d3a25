// What happens while a fake's call is under way.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace umem {

class SlowCalls {
 public:
  // Runs inside the next call of this name, which ends after it.
  void during(const std::string& call, std::function<void()> what) {
    const std::lock_guard lock(mutex_);
    next_[call] = std::move(what);
  }
  // By a fake, without a lock of its own.
  void enter(const char* call) {
    std::function<void()> what;
    {
      const std::lock_guard lock(mutex_);
      const auto found = next_.find(call);
      if (found == next_.end()) return;
      what = std::move(found->second);
      next_.erase(found);
    }
    what();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::function<void()>> next_;
};

}  // namespace umem
