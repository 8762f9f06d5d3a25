#include "cuda/cuda_page_locker.hpp"

#include <cuda_runtime_api.h>

#include "cuda/succeeded.hpp"

namespace umem {

bool CudaPageLocker::lock(Range range) noexcept {
  void* on_host = reinterpret_cast<void*>(range.address);
  if (!succeeded(cudaHostRegister(on_host, range.bytes,
                                  cudaHostRegisterPortable | cudaHostRegisterMapped)))
    return false;
  // A tensor has one address: the GPU must know the memory by the host's.
  void* on_device = nullptr;
  if (succeeded(cudaHostGetDevicePointer(&on_device, on_host, 0)) && on_device == on_host)
    return true;
  succeeded(cudaHostUnregister(on_host));
  return false;
}

// Unlike cudaFreeHost, cudaHostUnregister does not promise to wait for kernels that read in place.
void CudaPageLocker::unlock(Range range) noexcept {
  succeeded(cudaDeviceSynchronize());
  succeeded(cudaHostUnregister(reinterpret_cast<void*>(range.address)));
}

}  // namespace umem
