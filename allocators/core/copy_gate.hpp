// Has queued copies wait for a moment: the host's side of it.
//
// Note [Mapping beside copies]
//
// While a copy engine copies to the host, `cuMemSetAccess` takes 1.05 ms for each handle, whatever
// its size, and 0.03 to 0.08 ms else (benchmarks/results/h100-mapping-beside-copies.txt). So
// umem's copies to the host let mapping pass: each 64 MiB waits for a word in page-locked memory
// (`cuStreamWaitValue32`; cuda/host_copy_gate.cpp) that is set while handles are mapped. The wait
// takes none of the link's time. The word is clear again after 50 ms whatever happens: mapping may
// wait for a lock in the driver whose holder waits for all of the device's work, and so for the
// copies.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace umem {

// A word that the device reads before each copy, which waits while it is not 0. It is so while a
// thread is within Closed, but for no longer than a limit.
class CopyGate {
 public:
  CopyGate(std::uint32_t& word, std::chrono::milliseconds limit)
      : word_(word), limit_(limit), opener_([this] { open_at_limit(); }) {}
  CopyGate(const CopyGate&) = delete;
  CopyGate& operator=(const CopyGate&) = delete;
  ~CopyGate();

  const std::uint32_t* word() const { return &word_; }

  // Closes a gate for its life; nothing for nullptr.
  class Closed {
   public:
    explicit Closed(CopyGate* gate) : gate_(gate) {
      if (gate_ != nullptr) gate_->enter();
    }
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;
    ~Closed() {
      if (gate_ != nullptr) gate_->leave();
    }

   private:
    CopyGate* const gate_;
  };

 private:
  void enter();
  void leave();
  void open_at_limit();
  void set(std::uint32_t value) { std::atomic_ref(word_).store(value); }

  std::uint32_t& word_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned inside_ = 0;      // threads
  std::uint64_t times_ = 0;  // that it was closed
  bool ends_ = false;
  std::thread opener_;  // last: it uses the others
};

}  // namespace umem
