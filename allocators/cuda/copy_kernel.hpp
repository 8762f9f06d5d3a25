// A copy kernel, compiled by the driver for the present GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cuda_calls.hpp"

namespace umem {

// Needs the context that it was opened in to be current. Calls return the driver's error, or 0.
class CopyKernel {
 public:
  explicit CopyKernel(const CudaCalls& cuda) : cuda_(cuda) {}

  CUresult open() noexcept;
  void close() noexcept;

  // Whether the kernel can copy between these addresses.
  bool fits(std::uintptr_t to, std::uintptr_t from) const noexcept;
  CUresult launch(unsigned blocks, std::uintptr_t to, std::uintptr_t from, std::size_t bytes,
                  CUstream stream) const noexcept;

 private:
  const CudaCalls& cuda_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace umem
