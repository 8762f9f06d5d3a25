#include "cuda/cuda_hint_driver.hpp"

#include <stdexcept>
#include <string>

#include "cuda/scopes.hpp"
#include "cuda/succeeded.hpp"
#include "hints/allocations.hpp"

namespace umem {

CudaHintDriver::CudaHintDriver(int lanes) {
  if (const cudaError_t error = cudaGetDeviceCount(&devices_); !succeeded(error))
    throw std::runtime_error(std::string("cudaGetDeviceCount: ") + cudaGetErrorString(error));
  lane_devices_.resize(static_cast<std::size_t>(lanes));
  for (std::vector<LaneDevice>& row : lane_devices_) row.resize(static_cast<std::size_t>(devices_));
  idle_events_.resize(static_cast<std::size_t>(devices_));
}

CudaHintDriver::~CudaHintDriver() {
  for (const auto& event : events_) succeeded(cudaEventDestroy(event->handle));
}

// ---- events, in the training thread ----

EventId CudaHintDriver::record(int device, StreamId id) noexcept {
  if (device >= devices_) return kNoEvent;
  const auto stream = reinterpret_cast<cudaStream_t>(id);
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  // During a capture the event would become a node of the graph.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (!succeeded(cudaStreamIsCapturing(stream, &status)) || status != cudaStreamCaptureStatusNone)
    return kNoEvent;
  Event* event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::vector<Event*>& idle = idle_events_[static_cast<std::size_t>(device)];
    if (!idle.empty()) {
      event = idle.back();
      idle.pop_back();
    }
  }
  if (event == nullptr) {
    cudaEvent_t handle = nullptr;
    if (!succeeded(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming))) return kNoEvent;
    const std::lock_guard lock(mutex_);
    event = events_.emplace_back(new Event{handle, device}).get();
  }
  const auto id_of_event = reinterpret_cast<EventId>(event);
  if (succeeded(cudaEventRecord(event->handle, stream))) return id_of_event;
  recycle(id_of_event);
  return kNoEvent;
}

void CudaHintDriver::recycle(EventId id) noexcept {
  auto* event = reinterpret_cast<Event*>(id);
  const std::lock_guard lock(mutex_);
  idle_events_[static_cast<std::size_t>(event->device)].push_back(event);
}

// ---- a lane's streams and contexts ----

CUresult CudaHintDriver::retain(LaneDevice& lane_device, int device) noexcept {
  if (lane_device.primary.context != nullptr) return CUDA_SUCCESS;
  // These calls must not become part of a graph that another thread captures.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  cuda_.exchange_capture_mode(&mode);
  if (const CUresult error = cuda_.device_get(&lane_device.device, device)) return error;
  return cuda_.retain_primary(&lane_device.primary.context, lane_device.device);
}

CUresult CudaHintDriver::furnish(LaneStream& lane_stream) noexcept {
  if (const CUresult error = enter(lane_stream)) return error;
  if (lane_stream.stream == nullptr)
    if (const CUresult error = cuda_.create_stream(&lane_stream.stream, CU_STREAM_NON_BLOCKING))
      return error;
  if (lane_stream.done == nullptr)  // a waiting worker sleeps and leaves its core to the training
    return cuda_.create_event(&lane_stream.done, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING);
  return CUDA_SUCCESS;
}

CUresult CudaHintDriver::enter(const LaneStream& lane_stream) noexcept {
  return cuda_.set_current(lane_stream.context);
}

int CudaHintDriver::open(Lane lane, int device) noexcept {
  if (device >= devices_) return CUDA_ERROR_INVALID_DEVICE;
  LaneDevice& mine = lane_device(lane, device);
  if (const CUresult error = retain(mine, device)) return error;
  return furnish(mine.primary);
}

int CudaHintDriver::separate(Lane lane, int device) noexcept {
  LaneDevice& mine = lane_device(lane, device);
  if (const CUresult error =
          cuda_.create_context(&mine.own.context, CU_CTX_SCHED_BLOCKING_SYNC, mine.device)) {
    mine.own = {};
    return error;
  }
  const CUresult error = furnish(mine.own);
  if (error != CUDA_SUCCESS) {
    cuda_.destroy_context(mine.own.context);
    mine.own = {};
  }
  return error;
}

// Where evictions and advice run.
CudaHintDriver::LaneStream& CudaHintDriver::beside(LaneDevice& lane_device) noexcept {
  return lane_device.own.context != nullptr ? lane_device.own : lane_device.primary;
}

void CudaHintDriver::close(Lane lane) noexcept {
  for (LaneDevice& mine : lane_devices_[static_cast<std::size_t>(lane.number)]) {
    if (mine.own.context != nullptr) {
      leave(mine.own);
      cuda_.destroy_context(mine.own.context);
    }
    if (mine.primary.context != nullptr) {
      leave(mine.primary);
      cuda_.set_current(nullptr);
      cuda_.release_primary(mine.device);
    }
    mine = {};
  }
}

void CudaHintDriver::leave(LaneStream& lane_stream) noexcept {
  enter(lane_stream);
  wait(lane_stream);
  if (lane_stream.done != nullptr) cuda_.destroy_event(lane_stream.done);
  if (lane_stream.stream != nullptr) cuda_.destroy_stream(lane_stream.stream);
}

// ---- calls of a lane ----

int CudaHintDriver::query(Lane lane, int device, EventId id, bool& finished) noexcept {
  LaneDevice& mine = lane_device(lane, device);
  if (const CUresult error = retain(mine, device)) return error;
  if (const CUresult error = enter(mine.primary)) return error;
  const CUresult state = cuda_.query_event(reinterpret_cast<Event*>(id)->handle);
  finished = state == CUDA_SUCCESS;
  return state == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : state;
}

// In pageable memory, which the driver does not know, a range is one part.
template <class Call>
CUresult CudaHintDriver::for_each_allocation(Range range, Call call) const noexcept {
  const auto find = [&](std::uintptr_t address, Range& allocation) {
    CUdeviceptr base = 0;
    const CUresult error = cuda_.address_range(&base, &allocation.bytes, address);
    allocation.address = base;
    return error;
  };
  return umem::for_each_allocation(range, find, call);
}

// Each call uses an idle stream: on a busy one the driver would block inside the call, holding the
// context's lock.
template <class Call>
CUresult CudaHintDriver::move(LaneStream& lane_stream, Range range, Call call) noexcept {
  if (const CUresult error = enter(lane_stream)) return error;
  return for_each_allocation(range, [&](Range part) {
    if (const CUresult error = wait(lane_stream)) return error;
    lane_stream.busy = true;
    return call(part);
  });
}

int CudaHintDriver::prefetch(Lane lane, int device, Range range) noexcept {
  LaneDevice& mine = lane_device(lane, device);
  return move(mine.primary, range, [&](Range part) {
    return cuda_.prefetch(part.address, part.bytes, mine.device, mine.primary.stream);
  });
}

// A prefetch to the host keeps the device's copies of read-mostly pages. Withdrawing the
// read-mostly advice drops them; pages without a copy on the host are moved.
int CudaHintDriver::evict(Lane lane, int device, Range range) noexcept {
  LaneDevice& mine = lane_device(lane, device);
  LaneStream& own = beside(mine);
  return move(own, range, [&](Range part) {
    int read_mostly = 0;
    if (const CUresult error = cuda_.range_attribute(&read_mostly, sizeof read_mostly,
                                                     CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
                                                     part.address, part.bytes))
      return error;
    const auto give = [&](CUmem_advise advice) {
      return cuda_.advise(part.address, part.bytes, advice, mine.device);
    };
    if (read_mostly != 0)
      if (const CUresult error = give(CU_MEM_ADVISE_UNSET_READ_MOSTLY)) return error;
    const CUresult moved = cuda_.prefetch(part.address, part.bytes, CU_DEVICE_CPU, own.stream);
    if (read_mostly == 0) return moved;
    const CUresult results[] = {moved, wait(own), give(CU_MEM_ADVISE_SET_READ_MOSTLY)};
    for (const CUresult result : results)
      if (result != CUDA_SUCCESS) return result;
    return CUDA_SUCCESS;
  });
}

int CudaHintDriver::advise(Lane lane, int device, Range range, Advice advice) noexcept {
  LaneDevice& mine = lane_device(lane, device);
  if (const CUresult error = enter(beside(mine))) return error;
  const auto give = [&](CUmem_advise what, CUdevice where) {
    return for_each_allocation(range, [&](Range part) {
      return cuda_.advise(part.address, part.bytes, what, where);
    });
  };
  const CUdevice here = mine.device;
  const Placement preferred = preferred_location(advice);
  const CUresult results[] = {
      preferred == Placement::any
          ? give(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, here)
          : give(CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                 preferred == Placement::host ? CU_DEVICE_CPU : here),
      give(advice.accessed_by_device ? CU_MEM_ADVISE_SET_ACCESSED_BY
                                     : CU_MEM_ADVISE_UNSET_ACCESSED_BY,
           here),
      give(advice.read_mostly ? CU_MEM_ADVISE_SET_READ_MOSTLY : CU_MEM_ADVISE_UNSET_READ_MOSTLY,
           here)};
  for (const CUresult result : results)
    if (result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}

int CudaHintDriver::synchronize(Lane lane, int device) noexcept {
  LaneDevice& mine = lane_device(lane, device);
  const CUresult results[] = {wait(mine.primary), wait(mine.own)};
  for (const CUresult result : results)
    if (result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}

CUresult CudaHintDriver::wait(LaneStream& lane_stream) noexcept {
  if (!lane_stream.busy) return CUDA_SUCCESS;
  lane_stream.busy = false;
  if (const CUresult error = enter(lane_stream)) return error;
  if (const CUresult error = cuda_.record_event(lane_stream.done, lane_stream.stream)) return error;
  return cuda_.synchronize_event(lane_stream.done);
}

std::string CudaHintDriver::describe(int error) const {
  return cuda_.describe(static_cast<CUresult>(error));
}

}  // namespace umem
