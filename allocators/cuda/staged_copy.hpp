// Copies between managed memory and pinned host memory that overlap with kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/copy_kernel.hpp"
#include "cuda/cuda_calls.hpp"
#include "hints/request.hpp"

namespace umem {

// cudaMemcpyAsync blocks kernels while it copies managed memory, and a kernel that copies over the
// link occupies multiprocessors all the time. So a kernel copies between the managed memory and a
// few MiB of plain device memory, which is short, and the copy engines copy between that memory and
// the host, which occupies no multiprocessor.
//
// One direction on one device. Every call needs the context that it was opened in to be current,
// and returns the driver's error, or 0.
class StagedCopy {
 public:
  StagedCopy(const CudaCalls& cuda, Direction direction)
      : cuda_(cuda), kernel_(cuda), direction_(direction) {}

  // Loads the kernel and allocates the staging memory: before the first copy.
  CUresult open(CUdevice device) noexcept;
  // Call it only when no copy is running.
  void close() noexcept;

  // Whether the kernel can copy between these addresses.
  bool fits(std::uintptr_t to, std::uintptr_t from) const noexcept { return kernel_.fits(to, from); }

  // The kernel runs on `pages`, the copy engines on `link`. A copy to the host begins after the
  // work of `pages` and ends on `link`; a copy to the device vice versa.
  CUresult copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, CUstream pages,
                CUstream link) noexcept;

 private:
  struct Stage {
    CUdeviceptr memory = 0;
    CUevent full = nullptr;
    CUevent free = nullptr;
  };
  CUresult through(const Stage& stage, std::uintptr_t to, std::uintptr_t from, std::size_t bytes,
                   CUstream pages, CUstream link) noexcept;

  const CudaCalls& cuda_;
  CopyKernel kernel_;
  const Direction direction_;
  unsigned blocks_ = 0;
  std::array<Stage, 3> stages_;
  std::size_t next_ = 0;
};

}  // namespace umem
