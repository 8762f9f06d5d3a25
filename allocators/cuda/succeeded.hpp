// Whether a call of CUDA's runtime went well.
#pragma once

#include <cuda_runtime_api.h>

namespace umem {

// An error of ours must not be found by torch's next check of the thread's last error.
inline bool succeeded(cudaError_t error) noexcept {
  if (error == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

}  // namespace umem
