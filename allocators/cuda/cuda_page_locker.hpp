// Page-locks host memory with CUDA, for all GPUs of the process.
#pragma once

#include "core/pinned_memory.hpp"

namespace umem {

class CudaPageLocker final : public PageLocker {
 public:
  bool lock(Range range) noexcept override;
  // Waits for the current device.
  void unlock(Range range) noexcept override;
};

}  // namespace umem
