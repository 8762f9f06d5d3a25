// The two locks of a device.
#pragma once

#include <condition_variable>
#include <mutex>

namespace umem {

// `books` protects the books of the device's memory. The other lock is held, from begin to end, by
// whatever changes which memory the device has: one thread at a time, and it is taken first. lock()
// takes both.
class Locks {
 public:
  std::mutex books;

  void lock() {
    memory_.lock();
    std::unique_lock lock(books);
    awaits_records_ = true;
    recorded_.wait(lock, [this] { return recording_ == 0; });
    awaits_records_ = false;
    lock.release();
  }
  void unlock() {
    books.unlock();
    memory_.unlock();
  }

  // Makes a call that may take long, for a thread that holds `books`, without it. Afterwards
  // cached blocks may be used, live ones freed, and neighbours merged: only segments, and blocks
  // that are neither live nor in a heap, are what they were.
  template <class Call>
  auto unlocked(Call&& call) {
    struct Relock {
      std::mutex& mutex;
      ~Relock() { mutex.lock(); }
    };
    books.unlock();
    const Relock relock{books};
    return call();
  }

  // Makes a call that records events, for a thread that holds `books`: without it, unless a thread
  // that takes both locks waits for all that do so.
  template <class Call>
  void recording(Call&& call) {
    if (awaits_records_) return call();
    ++recording_;
    unlocked(call);
    if (--recording_ == 0 && awaits_records_) recorded_.notify_one();
  }

 private:
  std::mutex memory_;
  std::condition_variable recorded_;
  std::size_t recording_ = 0;    // threads that record events without `books`
  bool awaits_records_ = false;  // a thread waits for their end: others record with `books`
};

}  // namespace umem
