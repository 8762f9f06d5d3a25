// The hint engine's driver over CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/cuda_calls.hpp"
#include "cuda/staged_copy.hpp"
#include "hints/hint_driver.hpp"

namespace umem {

// Prefetches and copies go through the primary context, beside torch's work. What takes pages from
// the device goes through a context of its own: from the primary one it would hold up every kernel
// launch of the process for as long as it lasts.
class CudaHintDriver final : public HintDriver {
 public:
  // For `lanes` lanes on all devices. Throws std::runtime_error without a driver or a GPU.
  explicit CudaHintDriver(int lanes);
  ~CudaHintDriver() override;

  EventId record(int device, StreamId stream) noexcept override;
  void recycle(EventId event) noexcept override;
  int open(Lane lane, int device) noexcept override;
  int load(Lane lane, int device) noexcept override;
  void close(Lane lane) noexcept override;
  int query(Lane lane, int device, EventId event, bool& finished) noexcept override;
  int prefetch(Lane lane, int device, Range range) noexcept override;
  int evict(Lane lane, int device, Range range) noexcept override;
  int discard(Lane lane, int device, Range range) noexcept override;
  int copy(Lane lane, int device, std::uintptr_t to, std::uintptr_t from,
           std::size_t bytes) noexcept override;
  int advise(Lane lane, int device, Range range, Advice advice) noexcept override;
  int synchronize(Lane lane, int device) noexcept override;
  std::string describe(int error) const override;

 private:
  // A stream of one lane in one context.
  struct Station {
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    CUevent done = nullptr;
    bool busy = false;  // something was asked for since the last synchronize
  };
  // What one lane has of one device. Only the lane's thread touches it.
  struct Seat {
    CUdevice device = 0;
    Station primary, own;
    Station link;  // in the primary context: what of a copy goes by the copy engines
    std::unique_ptr<StagedCopy> staged;
  };
  struct Event {
    cudaEvent_t handle;
    int device;
  };

  Seat& seat(Lane lane, int device) noexcept {
    return seats_[static_cast<std::size_t>(lane.number)][static_cast<std::size_t>(device)];
  }
  CUresult retain(Seat& seat, int device) noexcept;
  CUresult furnish(Station& station) noexcept;
  CUresult enter(const Station& station) noexcept;
  CUresult wait(Station& station) noexcept;
  void leave(Station& station) noexcept;
  template <class Call>
  CUresult for_each_allocation(Range range, Call call) const noexcept;
  template <class Call>
  CUresult move(Station& station, Range range, Call call) noexcept;

  const CudaCalls cuda_;
  int devices_ = 0;
  std::vector<std::vector<Seat>> seats_;  // by lane and device

  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<std::vector<Event*>> idle_events_;  // by device
};

}  // namespace umem
