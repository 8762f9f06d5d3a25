#include "cuda/rmm_source.hpp"

#include <rmm/aligned.hpp>
#include <rmm/error.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/managed_memory_resource.hpp>

#include "core/host_mapping.hpp"
#include "cuda/cuda_page_locker.hpp"
#include "cuda/fork.hpp"
#include "cuda/scopes.hpp"
#include "cuda/succeeded.hpp"

namespace umem {
namespace {

int nearest_numa_node(int device) noexcept {
  int node = PinnedMemory::kAnyNode;
  return succeeded(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device))
             ? node
             : PinnedMemory::kAnyNode;
}

}  // namespace

RmmSource::RmmSource() : pinned_(std::make_unique<CudaPageLocker>()) {
  const auto resource = [this](MemoryKind kind) -> std::optional<Resource>& {
    return resources_[static_cast<std::size_t>(kind)];
  };
  resource(MemoryKind::managed) = rmm::mr::managed_memory_resource{};
  resource(MemoryKind::device) = rmm::mr::cuda_memory_resource{};
}

void* RmmSource::allocate(MemoryKind kind, int device, std::size_t bytes) {
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  if (kind == MemoryKind::pinned) return pinned_.allocate(bytes, nearest_numa_node(device));
  if (kind == MemoryKind::system) return reinterpret_cast<void*>(map_host(bytes).address);
  try {
    return resources_[static_cast<std::size_t>(kind)]->allocate_sync(
        bytes, rmm::CUDA_ALLOCATION_ALIGNMENT);
  } catch (const rmm::bad_alloc&) {  // rmm::out_of_memory among them
    cudaGetLastError();              // reported as umem's error: torch must not see it
    return nullptr;
  }
}

void RmmSource::deallocate(MemoryKind kind, int device, void* address,
                           std::size_t bytes) noexcept {
  if (in_forked_child()) return;  // the parent's memory: the child has no CUDA to free it with
  const RelaxedCaptureMode relaxed;
  const CurrentDevice current(device);
  if (kind == MemoryKind::pinned) return pinned_.deallocate(address, bytes);
  if (kind == MemoryKind::system)
    return unmap_host({reinterpret_cast<std::uintptr_t>(address), bytes});
  resources_[static_cast<std::size_t>(kind)]->deallocate_sync(
      address, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT);
}

}  // namespace umem
