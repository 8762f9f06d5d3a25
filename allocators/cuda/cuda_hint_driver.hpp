// The hint engine's driver over CUDA.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "hints/hint_driver.hpp"

namespace umem {

// The driver's functions, through the runtime's entry-point query: nothing links libcuda. They are
// the oldest forms that serve, which every driver that umem runs under still has.
struct CudaCalls {
  CudaCalls();  // throws std::runtime_error where one is missing

  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDevicePrimaryCtxRetain_v7000 retain_primary;
  PFN_cuDevicePrimaryCtxRelease_v11000 release_primary;
  PFN_cuCtxCreate_v3020 create_context;
  PFN_cuCtxDestroy_v4000 destroy_context;
  PFN_cuCtxSetCurrent_v4000 set_current;
  PFN_cuStreamCreate_v2000 create_stream;
  PFN_cuStreamDestroy_v4000 destroy_stream;
  PFN_cuEventCreate_v2000 create_event;
  PFN_cuEventDestroy_v4000 destroy_event;
  PFN_cuEventRecord_v2000 record_event;
  PFN_cuEventQuery_v2000 query_event;
  PFN_cuEventSynchronize_v2000 synchronize_event;
  PFN_cuThreadExchangeStreamCaptureMode_v10010 exchange_capture_mode;
  PFN_cuMemGetAddressRange_v3020 address_range;
  PFN_cuMemPrefetchAsync_v8000 prefetch;
  PFN_cuMemAdvise_v8000 advise;
  PFN_cuMemRangeGetAttribute_v8000 range_attribute;
  PFN_cuModuleLoadData_v2000 load_module;
  PFN_cuModuleUnload_v2000 unload_module;
  PFN_cuModuleGetFunction_v2000 get_function;
  PFN_cuLaunchKernel_v4000 launch;
  PFN_cuMemcpyAsync_v4000 copy;
  PFN_cuGetErrorName_v6000 error_name;
  PFN_cuGetErrorString_v6000 error_string;
  // From CUDA 13 on; nullptr before.
  CUresult (*discard)(CUdeviceptr*, std::size_t*, std::size_t, unsigned long long,
                      CUstream) = nullptr;
};

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
    CUmodule module = nullptr;
    CUfunction copy = nullptr;
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
