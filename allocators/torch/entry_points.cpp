#include "torch/entry_points.hpp"

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <cstdio>
#include <stdexcept>

#include "cuda/cuda_driver.hpp"
#include "cuda/fork.hpp"
#include "cuda/rmm_source.hpp"

namespace umem {
namespace {

Allocator* process_allocator = nullptr;

StreamId stream_id(cudaStream_t stream) { return reinterpret_cast<StreamId>(stream); }

}  // namespace

Allocator& install(const Config& config) {
  if (process_allocator != nullptr) throw std::logic_error("an allocator is installed already");
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess)
    throw std::runtime_error(std::string("cudaGetDeviceCount: ") + cudaGetErrorString(error));
  process_allocator =
      new Allocator(config, std::make_unique<RmmSource>(),
                    std::make_unique<CudaDriver>(devices), devices);
  guard_forks(*process_allocator);
  return *process_allocator;
}

Allocator* installed() noexcept { return process_allocator; }

}  // namespace umem

// torch passes these types by value across the boundary; both sides use libstdc++'s.
using StreamPredicate = std::function<bool(cudaStream_t)>;

extern "C" {

__attribute__((visibility("default"))) void* umem_malloc(ssize_t bytes, int device,
                                                         cudaStream_t stream) {
  // An exception reaches Python as RuntimeError; a null pointer would become a tensor without
  // memory. A negative size is too large a one.
  return umem::installed()->allocate(static_cast<std::size_t>(bytes), device,
                                     umem::stream_id(stream));
}

__attribute__((visibility("default"))) void umem_free(void* address, ssize_t bytes, int device,
                                                      cudaStream_t stream) {
  if (address == nullptr) return;
  if (!umem::installed()->free(reinterpret_cast<std::uintptr_t>(address), device,
                               umem::stream_id(stream)))
    std::fprintf(stderr, "umem: free of %zd bytes at %p on GPU %d, which holds no such tensor\n",
                 bytes, address, device);
}
}

namespace umem {
namespace {

void record_stream(void* address, cudaStream_t stream) {
  process_allocator->record_stream(reinterpret_cast<std::uintptr_t>(address), stream_id(stream));
}

void empty_cache() { process_allocator->empty_cache(); }

void memory_fraction(double fraction, int device) {
  process_allocator->device(device).set_memory_fraction(fraction);
}

void* base_allocation(void* address, std::size_t* bytes) {
  const auto base = process_allocator->base_allocation(reinterpret_cast<std::uintptr_t>(address));
  if (!base) throw std::invalid_argument("umem: no segment holds this address");
  if (bytes != nullptr) *bytes = base->bytes;
  return reinterpret_cast<void*>(base->address);
}

void begin_pool(int device, PoolId pool, StreamPredicate holds) {
  process_allocator->device(device).begin_pool(pool, [holds = std::move(holds)](StreamId stream) {
    return holds(reinterpret_cast<cudaStream_t>(stream));
  });
}

void end_pool(int device, PoolId pool) { process_allocator->device(device).end_pool(pool); }

void release_pool(int device, PoolId pool) {
  process_allocator->device(device).release_pool(pool);
}

template <class Function>
std::uintptr_t address_of(Function* function) {
  return reinterpret_cast<std::uintptr_t>(function);
}

}  // namespace

std::map<std::string, std::uintptr_t> entry_points() {
  return {{"malloc", address_of(umem_malloc)},
          {"free", address_of(umem_free)},
          {"record_stream", address_of(record_stream)},
          {"empty_cache", address_of(empty_cache)},
          {"memory_fraction", address_of(memory_fraction)},
          {"base_allocation", address_of(base_allocation)},
          {"begin_pool", address_of(begin_pool)},
          {"end_pool", address_of(end_pool)},
          {"release_pool", address_of(release_pool)}};
}

}  // namespace umem
