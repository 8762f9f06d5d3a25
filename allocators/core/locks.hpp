// The two locks of a device.
//
// Note [Locks of a device]
//
// Asking the driver for memory can take seconds: it waits for kernels, for other threads' calls,
// for the host. So each device has two locks, and such a call stops no thread that can do without
// new memory. `books` protects the books: every request and every free takes it, for microseconds.
// The other one is held, from begin to end, by whatever changes which memory the device has: new
// segments, mapped handles, memory that goes back, pauses. That is one thread at a time. It is
// taken first, and its holder releases `books` while it calls the driver, the memory's source or
// the hint engine. Meanwhile other threads are served from the cache, free, and read statistics; a
// request that needs new memory too waits for its turn, and looks into the cache again when it
// comes.
//
// New memory is counted against every limit before the call, and no longer after a refusal. Memory
// that goes back leaves the books before the call. So no two threads exceed a limit together, and
// nobody uses memory that is about to go. While a device is paused or resumed, requests wait,
// because the cache is about to lose its memory; frees go on.
//
// A free of a tensor that other streams have used records an event on each. CUDA blocks that call
// where a stream has too much work queued, so it is made without a lock. Whoever takes both locks
// waits for it: no capture of a graph begins meanwhile, whose node the event would be.
#pragma once

#include <condition_variable>
#include <mutex>

namespace umem {

// lock() takes both.
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
