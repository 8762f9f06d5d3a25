// The functions of CUDA's driver that umem calls.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <string>

namespace umem {

// Driver functions, looked up through the runtime's entry-point query, so that nothing links
// libcuda. These are the oldest sufficient versions, which every supported driver has.
struct CudaCalls {
  CudaCalls();  // throws std::runtime_error where one is missing

  // An error's name and meaning.
  std::string describe(CUresult error) const;

  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetAttribute_v2000 device_attribute;
  PFN_cuDevicePrimaryCtxGetState_v7000 primary_state;
  PFN_cuDevicePrimaryCtxRetain_v7000 retain_primary;
  PFN_cuDevicePrimaryCtxRelease_v11000 release_primary;
  PFN_cuCtxCreate_v3020 create_context;
  PFN_cuCtxDestroy_v4000 destroy_context;
  PFN_cuCtxSetCurrent_v4000 set_current;
  PFN_cuStreamCreate_v2000 create_stream;
  PFN_cuStreamDestroy_v4000 destroy_stream;
  PFN_cuEventCreate_v2000 create_event;
  PFN_cuEventDestroy_v4000 destroy_event;
  PFN_cuEventRecord_v2000 record_event;
  PFN_cuEventQuery_v2000 query_event;
  PFN_cuEventSynchronize_v2000 synchronize_event;
  PFN_cuStreamWaitEvent_v3020 wait_event;
  PFN_cuThreadExchangeStreamCaptureMode_v10010 exchange_capture_mode;
  PFN_cuMemAlloc_v3020 allocate;
  PFN_cuMemFree_v3020 free;
  PFN_cuMemGetAddressRange_v3020 address_range;
  PFN_cuMemAddressReserve_v10020 reserve_addresses;
  PFN_cuMemAddressFree_v10020 free_addresses;
  PFN_cuMemCreate_v10020 create_memory;
  PFN_cuMemRelease_v10020 release_memory;
  PFN_cuMemMap_v10020 map_memory;
  PFN_cuMemUnmap_v10020 unmap_memory;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuMemGetAllocationGranularity_v10020 allocation_granularity;
  PFN_cuMemPrefetchAsync_v8000 prefetch;
  PFN_cuMemAdvise_v8000 advise;
  PFN_cuMemRangeGetAttribute_v8000 range_attribute;
  PFN_cuModuleLoadData_v2000 load_module;
  PFN_cuModuleUnload_v2000 unload_module;
  PFN_cuModuleGetFunction_v2000 get_function;
  PFN_cuLaunchKernel_v4000 launch;
  PFN_cuMemcpyAsync_v4000 copy;
  PFN_cuStreamWriteValue32_v11070 write_word;
  PFN_cuStreamWaitValue32_v11070 wait_for_word;
  PFN_cuGetErrorName_v6000 error_name;
  PFN_cuGetErrorString_v6000 error_string;
};

}  // namespace umem
