// The tensor class of new blocks.
//
// Note [Classes]
//
// The phase (forward, optimizer step, ...) belongs to the process, not to a thread: autograd runs
// backward passes in its own threads, and loaders fill weights from thread pools. torch runs no
// post hook when a step raises. Then the failing allocation itself corrects the phase (most such
// errors are out-of-memory), or the next gradient, or the next step.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "core/types.hpp"

namespace umem {

class ClassContext;

namespace detail {
struct Override {
  const ClassContext* owner = nullptr;
  std::uint64_t token = 0;
  TensorClass tensor_class = TensorClass::other;
};

// Without a destructor, so that it may be read while the process or the thread ends.
struct Overrides {
  std::size_t size = 0;
  std::array<Override, 32> items{};
};
}  // namespace detail

// An override belongs to the thread that entered it, and applies to threads without an override
// too.
class ClassContext {
 public:
  TensorClass current() const noexcept {
    const Overrides& mine = overrides_of_this_thread;
    for (std::size_t i = mine.size; i-- > 0;)
      if (mine.items[i].owner == this) return mine.items[i].tensor_class;
    return ambient_.load(std::memory_order_relaxed);
  }

  TensorClass phase() const noexcept { return phase_.load(std::memory_order_relaxed); }

  void set_phase(TensorClass phase) {
    const std::lock_guard lock(mutex_);
    phase_.store(phase, std::memory_order_relaxed);
    if (scopes_.empty()) ambient_.store(phase, std::memory_order_relaxed);
  }

  std::mutex& mutex() { return mutex_; }  // for fork

  // Returns a token for leave(), which the same thread must call.
  std::uint64_t enter(TensorClass tensor_class) {
    Overrides& mine = overrides_of_this_thread;
    if (mine.size == mine.items.size())
      throw std::length_error("tensor_class: over 32 nested overrides");
    const std::lock_guard lock(mutex_);
    const Override entered{this, ++last_token_, tensor_class};
    scopes_.push_back(entered);
    mine.items[mine.size++] = entered;
    ambient_.store(tensor_class, std::memory_order_relaxed);
    return entered.token;
  }

  // False when this thread holds no such override.
  bool leave(std::uint64_t token) {
    Overrides& mine = overrides_of_this_thread;
    const auto held = [&](const Override& o) { return o.owner == this && o.token == token; };
    const auto end = mine.items.begin() + static_cast<std::ptrdiff_t>(mine.size);
    const auto found = std::find_if(mine.items.begin(), end, held);
    if (found == end) return false;
    std::move(found + 1, end, found);
    --mine.size;
    const std::lock_guard lock(mutex_);
    std::erase_if(scopes_, held);
    ambient_.store(scopes_.empty() ? phase() : scopes_.back().tensor_class,
                   std::memory_order_relaxed);
    return true;
  }

 private:
  using Override = detail::Override;
  using Overrides = detail::Overrides;

  inline static thread_local constinit Overrides overrides_of_this_thread;

  std::mutex mutex_;
  // Read relaxed: nothing else is read by their means. A thread that is started or woken after a
  // change sees it, as any other value.
  std::atomic<TensorClass> phase_{TensorClass::weights};
  std::atomic<TensorClass> ambient_{TensorClass::weights};
  std::uint64_t last_token_ = 0;
  std::vector<Override> scopes_;  // of all threads, oldest first
};

}  // namespace umem
