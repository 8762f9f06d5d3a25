#include "cuda/host_copy_gate.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <mutex>

#include "cuda/succeeded.hpp"

namespace umem {
namespace {

// Several times what it takes to map 2 GiB in handles of 8 MiB.
constexpr auto kLimit = std::chrono::milliseconds(50);

// For the life of the process: queued copies may wait for it.
std::atomic<CopyGate*> made = nullptr;

// nullptr where there is no memory for it, and copies do without.
CopyGate* made_once() noexcept {
  static std::once_flag asked;
  std::call_once(asked, [] {
    void* word = nullptr;
    if (!succeeded(cudaHostAlloc(&word, sizeof(std::uint32_t),
                                 cudaHostAllocPortable | cudaHostAllocMapped)))
      return;
    auto* const open = static_cast<std::uint32_t*>(word);
    *open = 0;
    made = new CopyGate(*open, kLimit);
  });
  return made;
}

}  // namespace

CUresult queue_gate(const CudaCalls& cuda, CUstream stream) noexcept {
  const CopyGate* const gate = made_once();
  if (gate == nullptr) return CUDA_SUCCESS;
  return cuda.wait_for_word(stream, reinterpret_cast<CUdeviceptr>(gate->word()), 0,
                            CU_STREAM_WAIT_VALUE_EQ);
}

CopyGate* host_copy_gate() noexcept { return made; }

}  // namespace umem
