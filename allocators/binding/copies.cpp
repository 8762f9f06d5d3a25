#include "binding/copies.hpp"

#ifdef UMEM_HAS_CUDA
#include <cuda_runtime_api.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/cuda_calls.hpp"
#include "cuda/fork.hpp"
#include "cuda/host_copy_gate.hpp"
#include "cuda/scopes.hpp"
#include "cuda/staged_copy.hpp"
#include "cuda/succeeded.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace umem {

#ifdef UMEM_HAS_CUDA
namespace {

const CudaCalls& calls() {
  static const CudaCalls found;
  return found;
}

// The address to copy to, the source's, and bytes.
using Copy = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>;

// Of one call. Beside copies in the other direction, chunks of 32 MiB came to the device at 50 GB/s,
// 256 MiB at 48, and 1.5 GiB at 44 (one H100, PCIe 5, driver 580.159, 2026-11-23).
constexpr std::size_t kChunkBytes = std::size_t{64} << 20;

// Python takes longer for each of these calls than the driver does.
void queue_copies(const std::vector<Copy>& copies, std::uintptr_t stream, bool to_host,
                  std::uintptr_t word) {
  const auto queue = reinterpret_cast<cudaStream_t>(stream);
  const auto check = [](const char* call, CUresult result) {
    if (result != CUDA_SUCCESS)
      throw std::runtime_error(std::string(call) + ": " + calls().describe(result));
  };
  for (const auto& [to, source, size_bytes] : copies)
    for (std::size_t offset = 0; offset < size_bytes; offset += kChunkBytes) {
      const std::size_t bytes = std::min(kChunkBytes, size_bytes - offset);
      if (to_host) check("cuStreamWaitValue32", queue_gate(calls(), queue));
      const cudaError_t error =
          cudaMemcpyAsync(reinterpret_cast<void*>(to + offset),
                          reinterpret_cast<const void*>(source + offset), bytes, cudaMemcpyDefault,
                          queue);
      if (!succeeded(error))
        throw std::runtime_error("cudaMemcpyAsync failed for " + std::to_string(bytes) +
                                 " bytes: " + cudaGetErrorString(error));
      if (word != 0) check("cuStreamWriteValue32", calls().write_word(queue, word, 0, 0));
    }
}

// Where CUDA knows an address to be.
const char* memory_type(std::uintptr_t address) {
  cudaPointerAttributes found{};
  const cudaError_t error =
      cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address));
  if (!succeeded(error))
    throw std::runtime_error(std::string("cudaPointerGetAttributes failed: ") +
                             cudaGetErrorString(error));
  switch (found.type) {
    case cudaMemoryTypeHost:
      return "host";
    case cudaMemoryTypeDevice:
      return "device";
    case cudaMemoryTypeManaged:
      return "managed";
    default:
      return "unregistered";
  }
}

// Runs in the device's primary context, to which torch's streams belong.
class Copier {
 public:
  Copier(int device, bool leaves)
      : device_(device), copy_(calls(), leaves ? Direction::to_host : Direction::to_device) {
    const RelaxedCaptureMode relaxed;
    const CurrentDevice current(device_);
    succeeded(cudaFree(nullptr));  // makes the context current in a new thread
    CUdevice handle = 0;
    check(calls().device_get(&handle, device_));
    const CUresult error = copy_.open(handle);
    if (error != CUDA_SUCCESS) copy_.close();
    check(error);
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  ~Copier() {
    if (in_forked_child()) return;
    const RelaxedCaptureMode relaxed;
    const CurrentDevice current(device_);
    copy_.close();
  }

  bool fits(std::uintptr_t to, std::uintptr_t from) const noexcept { return copy_.fits(to, from); }

  void copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, std::uintptr_t pages,
            std::uintptr_t link) {
    check(copy_.copy(to, from, bytes, reinterpret_cast<CUstream>(pages),
                     reinterpret_cast<CUstream>(link)));
  }

 private:
  static void check(CUresult error) {
    if (error != CUDA_SUCCESS) throw std::runtime_error("staged copy: " + calls().describe(error));
  }

  const int device_;
  StagedCopy copy_;
};

}  // namespace

void bind_copies(nb::module_& module) {
  module.def("queue_copies", &queue_copies, "copies"_a, "stream"_a, "to_host"_a, "word"_a);
  module.def("memory_type", &memory_type, "address"_a);
  nb::class_<Copier>(module, "StagedCopy")
      .def(nb::init<int, bool>(), "device"_a, "leaves"_a)
      .def("fits", &Copier::fits, "to"_a, "source"_a)
      .def("copy", &Copier::copy, "to"_a, "source"_a, "size_bytes"_a, "pages"_a, "link"_a);
}
#else
void bind_copies(nb::module_&) {}
#endif

}  // namespace umem
