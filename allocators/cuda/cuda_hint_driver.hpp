// The hint engine's driver over CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/cuda_calls.hpp"
#include "hints/hint_driver.hpp"

namespace umem {

// Prefetches use the primary context, beside torch's work. Evictions use a second context: from the
// primary one they would block every kernel launch of the process for as long as they run. Where
// none can be had (limits of MPS, confidential computing, a full card), they use the primary one.
class CudaHintDriver final : public HintDriver {
 public:
  // For `lanes` lanes on all devices. Throws std::runtime_error without a driver or a GPU.
  explicit CudaHintDriver(int lanes);
  ~CudaHintDriver() override;

  EventId record(int device, StreamId stream) noexcept override;
  void recycle(EventId event) noexcept override;
  int open(Lane lane, int device) noexcept override;
  int separate(Lane lane, int device) noexcept override;
  void close(Lane lane) noexcept override;
  int query(Lane lane, int device, EventId event, bool& finished) noexcept override;
  int prefetch(Lane lane, int device, Range range) noexcept override;
  int evict(Lane lane, int device, Range range) noexcept override;
  int advise(Lane lane, int device, Range range, Advice advice) noexcept override;
  int synchronize(Lane lane, int device) noexcept override;
  std::string describe(int error) const override;

 private:
  // A stream of one lane in one context.
  struct LaneStream {
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    CUevent done = nullptr;
    bool busy = false;  // has work since the last synchronize
  };
  // A lane's streams on one device, used by the lane's thread only.
  struct LaneDevice {
    CUdevice device = 0;
    LaneStream primary;
    LaneStream own;  // in the second context; none where it cannot be had
  };
  struct Event {
    cudaEvent_t handle;
    int device;
  };

  LaneDevice& lane_device(Lane lane, int device) noexcept {
    return lane_devices_[static_cast<std::size_t>(lane.number)][static_cast<std::size_t>(device)];
  }
  CUresult retain(LaneDevice& lane_device, int device) noexcept;
  LaneStream& beside(LaneDevice& lane_device) noexcept;
  CUresult furnish(LaneStream& lane_stream) noexcept;
  CUresult enter(const LaneStream& lane_stream) noexcept;
  CUresult wait(LaneStream& lane_stream) noexcept;
  void leave(LaneStream& lane_stream) noexcept;
  template <class Call>
  CUresult for_each_allocation(Range range, Call call) const noexcept;
  template <class Call>
  CUresult move(LaneStream& lane_stream, Range range, Call call) noexcept;

  const CudaCalls cuda_;
  int devices_ = 0;
  std::vector<std::vector<LaneDevice>> lane_devices_;  // by lane and device

  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<std::vector<Event*>> idle_events_;  // by device
};

}  // namespace umem
