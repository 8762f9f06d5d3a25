// Copies to the host wait while memory is mapped.
#pragma once

#include "core/copy_gate.hpp"
#include "cuda/cuda_calls.hpp"

namespace umem {

// While a copy engine copies to the host, cuMemSetAccess takes 1.05 ms for each handle, of 2 MiB as
// of 128, and else 0.03 to 0.08 ms (benchmarks/results/h100-mapping-beside-copies.txt). So copies to
// the host let it pass. A gate before each 64 MiB takes none of the link's time.

// Has later work of the stream wait while the gate is closed. Returns the driver's error, or 0.
CUresult queue_gate(const CudaCalls& cuda, CUstream stream) noexcept;

// nullptr where no copy waits for it.
CopyGate* host_copy_gate() noexcept;

}  // namespace umem
