// Whether a call of CUDA's runtime succeeded.
#pragma once

#include <cuda_runtime_api.h>

namespace umem {

// Clears the thread's last error, so that torch's next check does not find it.
inline bool succeeded(cudaError_t error) noexcept {
  if (error == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

}  // namespace umem
