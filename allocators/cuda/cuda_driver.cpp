#include "cuda/cuda_driver.hpp"

#include <stdexcept>

#include "cuda/cuda_calls.hpp"
#include "cuda/fork.hpp"
#include "cuda/scopes.hpp"
#include "cuda/succeeded.hpp"

namespace umem {
namespace {

cudaStream_t stream_handle(StreamId stream) noexcept {
  return reinterpret_cast<cudaStream_t>(stream);
}

// CUDA 13 names places by type and number; CUDA 12's calls take a number, the host's is -1.
#if CUDART_VERSION >= 13000
cudaMemLocation device_location(int device) noexcept {
  return {.type = cudaMemLocationTypeDevice, .id = device};
}
cudaMemLocation host_location() noexcept { return {.type = cudaMemLocationTypeHost, .id = 0}; }
cudaError_t prefetch(Range range, cudaMemLocation to, cudaStream_t stream) noexcept {
  return cudaMemPrefetchAsync(reinterpret_cast<void*>(range.address), range.bytes, to, 0, stream);
}
#else
int device_location(int device) noexcept { return device; }
int host_location() noexcept { return cudaCpuDeviceId; }
cudaError_t prefetch(Range range, int to, cudaStream_t stream) noexcept {
  return cudaMemPrefetchAsync(reinterpret_cast<void*>(range.address), range.bytes, to, stream);
}
#endif

// Whether the process uses the device: asking makes no context there.
bool has_context(int device) noexcept {
  static const std::unique_ptr<const CudaCalls> cuda = []() -> std::unique_ptr<const CudaCalls> {
    try {
      return std::make_unique<const CudaCalls>();
    } catch (const std::runtime_error&) {  // a driver without these calls
      return nullptr;
    }
  }();
  unsigned flags = 0;
  int is_active = 0;
  CUdevice handle = 0;
  return cuda != nullptr && cuda->device_get(&handle, device) == CUDA_SUCCESS &&
         cuda->primary_state(handle, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
}

}  // namespace

EventId CudaDriver::record(int device, StreamId stream) noexcept {
  if (in_forked_child()) return 0;
  const RelaxedCaptureMode relaxed;
  if (const EventId event = record_on(device, stream); event != 0 || stream == 0) return event;
  // Only an event of the stream's own device can be recorded on it.
  for (int other = 0; other < static_cast<int>(devices_.size()); ++other)
    if (other != device && has_context(other))
      if (const EventId event = record_on(other, stream)) return event;
  return 0;
}

EventId CudaDriver::record_on(int device, StreamId stream) noexcept {
  const CurrentDevice current(device);
  Event* event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::vector<Event*>& idle = devices_[static_cast<std::size_t>(device)].idle_events;
    if (!idle.empty()) {
      event = idle.back();
      idle.pop_back();
    }
  }
  if (event == nullptr) {
    cudaEvent_t handle = nullptr;
    if (!succeeded(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming))) return 0;
    event = new Event{handle, device};
  }
  if (!succeeded(cudaEventRecord(event->handle, stream_handle(stream)))) {
    recycle(event);
    return 0;
  }
  return reinterpret_cast<EventId>(event);
}

EventId CudaDriver::record_all(int device, std::span<const StreamId> streams) noexcept {
  if (in_forked_child()) return 0;
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  cudaStream_t const meeting = made_once(device, &Device::meeting);
  if (meeting == nullptr) return 0;
  const auto place = reinterpret_cast<StreamId>(meeting);
  for (const StreamId stream : streams) {
    const EventId event = record(device, stream);
    if (event == 0 || !order(device, place, event)) return 0;
  }
  return record_on(device, place);
}

bool CudaDriver::finished(EventId id) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  auto* event = reinterpret_cast<Event*>(id);
  if (!succeeded(cudaEventQuery(event->handle))) return false;
  recycle(event);
  return true;
}

void CudaDriver::wait(EventId id) noexcept {
  if (in_forked_child()) return;
  const RelaxedCaptureMode relaxed;
  auto* event = reinterpret_cast<Event*>(id);
  succeeded(cudaEventSynchronize(event->handle));
  recycle(event);
}

bool CudaDriver::order(int device, StreamId stream, EventId id) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  auto* event = reinterpret_cast<Event*>(id);
  const bool ordered = succeeded(cudaStreamWaitEvent(stream_handle(stream), event->handle, 0));
  recycle(event);
  return ordered;
}

void CudaDriver::recycle(Event* event) noexcept {
  const std::lock_guard lock(mutex_);
  devices_[static_cast<std::size_t>(event->device)].idle_events.push_back(event);
}

bool CudaDriver::capturing(StreamId stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return succeeded(cudaStreamIsCapturing(stream_handle(stream), &status)) &&
         status != cudaStreamCaptureStatusNone;
}

bool CudaDriver::advise(int device, Range range, Advice advice) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  const auto give = [&](cudaMemoryAdvise what, auto location) {
    return succeeded(
        cudaMemAdvise(reinterpret_cast<void*>(range.address), range.bytes, what, location));
  };
  const auto here = device_location(device);
  const Placement preferred = preferred_location(advice);
  const bool placed =
      preferred == Placement::any
          ? give(cudaMemAdviseUnsetPreferredLocation, here)
          : give(cudaMemAdviseSetPreferredLocation,
                 preferred == Placement::device ? here : host_location());
  const bool accessed = give(advice.accessed_by_device ? cudaMemAdviseSetAccessedBy
                                                       : cudaMemAdviseUnsetAccessedBy,
                             here);
  const bool read = give(
      advice.read_mostly ? cudaMemAdviseSetReadMostly : cudaMemAdviseUnsetReadMostly, here);
  return placed && accessed && read;
}

bool CudaDriver::populate(int device, Range range) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  // On a full card this would evict other pages: let these pages come by first touch.
  if (memory(device).free_bytes < range.bytes) return true;
  const cudaStream_t stream = separate_stream(device);
  return stream != nullptr && succeeded(prefetch(range, device_location(device), stream));
}

// A separate stream: a prefetch on a stream with pending work blocks the caller until that work is
// done. Its calls may block too, so they run without the lock: recording an event must not wait.
cudaStream_t CudaDriver::separate_stream(int device) noexcept {
  return made_once(device, &Device::stream);
}

cudaStream_t CudaDriver::made_once(int device, cudaStream_t Device::* stream) noexcept {
  const std::lock_guard lock(mutex_);
  cudaStream_t& made = devices_[static_cast<std::size_t>(device)].*stream;
  if (made == nullptr) succeeded(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return made;
}

MemoryInfo CudaDriver::memory(int device) noexcept {
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  MemoryInfo info;
  succeeded(cudaMemGetInfo(&info.free_bytes, &info.total_bytes));
  return info;
}

bool CudaDriver::synchronize(int device) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  return succeeded(cudaDeviceSynchronize());
}

bool CudaDriver::copy(int device, std::uintptr_t to, std::uintptr_t from,
                      std::size_t bytes) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  const cudaStream_t stream = separate_stream(device);
  return stream != nullptr &&
         succeeded(cudaMemcpyAsync(reinterpret_cast<void*>(to),
                                   reinterpret_cast<const void*>(from), bytes, cudaMemcpyDefault,
                                   stream)) &&
         succeeded(cudaStreamSynchronize(stream));
}

void CudaDriver::fill(int device, StreamId stream, Range range, unsigned char value) noexcept {
  if (in_forked_child()) return;
  const CurrentDevice current(device);
  // Of the default stream it is refused while streams are captured that wait for it.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  if (succeeded(cudaStreamIsCapturing(stream_handle(stream), &status)) &&
      status == cudaStreamCaptureStatusNone)
    succeeded(cudaMemsetAsync(reinterpret_cast<void*>(range.address), value, range.bytes,
                              stream_handle(stream)));
}

bool CudaDriver::evict(int device, Range range) noexcept {
  if (in_forked_child()) return false;
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  const cudaStream_t stream = separate_stream(device);
  return stream != nullptr && succeeded(prefetch(range, host_location(), stream)) &&
         succeeded(cudaStreamSynchronize(stream));
}

VirtualMemory* CudaDriver::virtual_memory() noexcept {
  if (in_forked_child()) return nullptr;
  std::call_once(asked_, [this] {
    const RelaxedCaptureMode relaxed;
    try {
      virtual_memory_ = std::make_unique<CudaVirtualMemory>(static_cast<int>(devices_.size()));
    } catch (const std::runtime_error&) {  // a driver without these calls
    }
  });
  return virtual_memory_.get();
}

}  // namespace umem
