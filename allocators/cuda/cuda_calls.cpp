#include "cuda/cuda_calls.hpp"

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/succeeded.hpp"

namespace umem {
namespace {

template <class Function>
void require(Function& function, const char* name, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const bool asked = succeeded(
      cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableLegacyStream, &found));
  function = reinterpret_cast<Function>(address);
  if (!asked || found != cudaDriverEntryPointSuccess || address == nullptr)
    throw std::runtime_error(std::string("no entry point ") + name + " of CUDA " +
                             std::to_string(version / 1000) + "." +
                             std::to_string(version % 1000 / 10) +
                             ": there is no NVIDIA driver here, or one that is too old");
}

}  // namespace

CudaCalls::CudaCalls() {
  require(device_get, "cuDeviceGet", 2000);
  require(device_attribute, "cuDeviceGetAttribute", 2000);
  require(primary_state, "cuDevicePrimaryCtxGetState", 7000);
  require(retain_primary, "cuDevicePrimaryCtxRetain", 7000);
  require(release_primary, "cuDevicePrimaryCtxRelease", 11000);
  require(create_context, "cuCtxCreate", 3020);
  require(destroy_context, "cuCtxDestroy", 4000);
  require(set_current, "cuCtxSetCurrent", 4000);
  require(create_stream, "cuStreamCreate", 2000);
  require(destroy_stream, "cuStreamDestroy", 4000);
  require(create_event, "cuEventCreate", 2000);
  require(destroy_event, "cuEventDestroy", 4000);
  require(record_event, "cuEventRecord", 2000);
  require(query_event, "cuEventQuery", 2000);
  require(synchronize_event, "cuEventSynchronize", 2000);
  require(wait_event, "cuStreamWaitEvent", 3020);
  require(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010);
  require(allocate, "cuMemAlloc", 3020);
  require(free, "cuMemFree", 3020);
  require(address_range, "cuMemGetAddressRange", 3020);
  require(reserve_addresses, "cuMemAddressReserve", 10020);
  require(free_addresses, "cuMemAddressFree", 10020);
  require(create_memory, "cuMemCreate", 10020);
  require(release_memory, "cuMemRelease", 10020);
  require(map_memory, "cuMemMap", 10020);
  require(unmap_memory, "cuMemUnmap", 10020);
  require(set_access, "cuMemSetAccess", 10020);
  require(allocation_granularity, "cuMemGetAllocationGranularity", 10020);
  require(prefetch, "cuMemPrefetchAsync", 8000);
  require(advise, "cuMemAdvise", 8000);
  require(range_attribute, "cuMemRangeGetAttribute", 8000);
  require(load_module, "cuModuleLoadData", 2000);
  require(unload_module, "cuModuleUnload", 2000);
  require(get_function, "cuModuleGetFunction", 2000);
  require(launch, "cuLaunchKernel", 4000);
  require(copy, "cuMemcpyAsync", 4000);
  require(write_word, "cuStreamWriteValue32", 11070);
  require(wait_for_word, "cuStreamWaitValue32", 11070);
  require(error_name, "cuGetErrorName", 6000);
  require(error_string, "cuGetErrorString", 6000);
}

std::string CudaCalls::describe(CUresult error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  error_name(error, &name);
  error_string(error, &text);
  return std::string(name == nullptr ? "unknown error" : name) + ": " +
         (text == nullptr ? "no description" : text);
}

}  // namespace umem
