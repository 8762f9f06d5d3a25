#include "cuda/cuda_virtual_memory.hpp"

#include <algorithm>

#include "cuda/fork.hpp"
#include "cuda/host_copy_gate.hpp"
#include "cuda/scopes.hpp"
#include "cuda/succeeded.hpp"

namespace umem {
namespace {

// The device's primary context, current in this thread: a thread may not have used CUDA yet.
class Context {
 public:
  explicit Context(int device) : current_(device) { succeeded(cudaSetDevice(device)); }

 private:
  const RelaxedCaptureMode relaxed_;
  const CurrentDevice current_;
};

CUmemAccessDesc read_and_write(int device) noexcept {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

// Copies between GPUs without access to each other's memory work for cudaMalloc's memory only.
bool all_are_peers(int devices) noexcept {
  for (int device = 0; device < devices; ++device)
    for (int peer = 0; peer < devices; ++peer) {
      int can_access = 0;
      if (device != peer &&
          (!succeeded(cudaDeviceCanAccessPeer(&can_access, device, peer)) || can_access == 0))
        return false;
    }
  return true;
}

}  // namespace

CudaVirtualMemory::CudaVirtualMemory(int devices) : devices_(static_cast<std::size_t>(devices)) {
  if (!all_are_peers(devices)) return;
  for (int number = 0; number < devices; ++number) {
    Device& device = devices_[static_cast<std::size_t>(number)];
    device.access.push_back(read_and_write(number));
    CUmemAllocationProp& properties = device.properties;
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = number;
    CUdevice handle = 0;
    if (cuda_.device_get(&handle, number) != CUDA_SUCCESS) continue;
    const auto has = [&](CUdevice_attribute attribute) {
      int value = 0;
      return cuda_.device_attribute(&value, attribute, handle) == CUDA_SUCCESS && value != 0;
    };
    if (!has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) continue;
    if (has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED))
      properties.allocFlags.gpuDirectRDMACapable = 1;  // as memory of cudaMalloc is
    std::size_t granularity = 0;
    if (cuda_.allocation_granularity(&granularity, &properties,
                                     CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS)
      device.granularity = granularity;
  }
}

std::size_t CudaVirtualMemory::granularity(int device) noexcept {
  return devices_[static_cast<std::size_t>(device)].granularity;
}

std::uintptr_t CudaVirtualMemory::reserve(int device, std::size_t bytes,
                                          std::size_t alignment) noexcept {
  if (in_forked_child()) return 0;
  const Context context(device);
  CUdeviceptr address = 0;
  return cuda_.reserve_addresses(&address, bytes, alignment, 0, 0) == CUDA_SUCCESS ? address : 0;
}

void CudaVirtualMemory::unreserve(Range range) noexcept {
  if (!in_forked_child()) cuda_.free_addresses(range.address, range.bytes);
}

HandleId CudaVirtualMemory::create(int device, std::size_t bytes) noexcept {
  if (in_forked_child()) return 0;
  const Context context(device);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp& properties = devices_[static_cast<std::size_t>(device)].properties;
  return cuda_.create_memory(&handle, bytes, &properties, 0) == CUDA_SUCCESS ? handle : 0;
}

void CudaVirtualMemory::release(HandleId handle) noexcept {
  if (!in_forked_child()) cuda_.release_memory(handle);
}

bool CudaVirtualMemory::map(int device, std::span<const Range> ranges, std::size_t handle_bytes,
                            std::span<const HandleId> handles) noexcept {
  if (in_forked_child()) return false;
  const Context context(device);
  auto handle = handles.begin();
  const auto place = [&](const Range& range) {
    for (std::size_t offset = 0; offset < range.bytes; offset += handle_bytes, ++handle)
      if (cuda_.map_memory(range.address + offset, handle_bytes, 0, *handle, 0) != CUDA_SUCCESS)
        return false;
    return true;
  };
  if (std::ranges::all_of(ranges, place) && give_access(device, ranges)) return true;
  auto mapped = handle - handles.begin();
  for (const Range& range : ranges)
    for (std::size_t offset = 0; offset < range.bytes && mapped != 0;
         offset += handle_bytes, --mapped)
      cuda_.unmap_memory(range.address + offset, handle_bytes);
  return false;
}

bool CudaVirtualMemory::give_access(int device, std::span<const Range> ranges) noexcept {
  const CopyGate::Closed closed(host_copy_gate());
  const std::lock_guard lock(mutex_);
  const std::vector<CUmemAccessDesc>& access = devices_[static_cast<std::size_t>(device)].access;
  return std::ranges::all_of(ranges, [&](const Range& range) {
    return cuda_.set_access(range.address, range.bytes, access.data(), access.size()) ==
           CUDA_SUCCESS;
  });
}

// A call for each handle: the driver documents no range of several mappings.
void CudaVirtualMemory::unmap(Range range, std::size_t handle_bytes) noexcept {
  if (in_forked_child()) return;
  for (std::size_t offset = 0; offset < range.bytes; offset += handle_bytes)
    cuda_.unmap_memory(range.address + offset, handle_bytes);
}

bool CudaVirtualMemory::add_peer(int device, int peer, std::span<const Range> mapped) noexcept {
  if (in_forked_child()) return false;
  const Context context(device);
  const std::lock_guard lock(mutex_);
  const CUmemAccessDesc access = read_and_write(peer);
  bool allowed = true;
  for (const Range& range : mapped)
    allowed =
        cuda_.set_access(range.address, range.bytes, &access, 1) == CUDA_SUCCESS && allowed;
  if (allowed) devices_[static_cast<std::size_t>(device)].access.push_back(access);
  return allowed;
}

}  // namespace umem
