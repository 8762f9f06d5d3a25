#include "cuda/copy_kernel.hpp"

namespace umem {
namespace {

constexpr unsigned kThreads = 512;
constexpr std::size_t kAlignment = 16;  // of both addresses

// umem_copy(to, from, bytes): 16 bytes per thread and iteration, four loads in flight; the thread
// that reaches the last, shorter piece copies it byte by byte.
constexpr char kCopyKernel[] = R"(
.version 6.0
.target sm_60
.address_size 64

.visible .entry umem_copy(.param .u64 to, .param .u64 from, .param .u64 bytes)
{
  .reg .pred %p;
  .reg .b16 %byte;
  .reg .b32 %x<16>, %block, %blocks, %thread, %threads;
  .reg .b64 %to, %from, %bytes, %i, %step, %step3, %step4, %last, %a, %b;

  ld.param.u64 %to, [to];
  ld.param.u64 %from, [from];
  ld.param.u64 %bytes, [bytes];
  cvta.to.global.u64 %to, %to;
  cvta.to.global.u64 %from, %from;
  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mul.wide.u32 %step, %blocks, %threads;
  shl.b64 %step, %step, 4;
  mul.lo.u64 %step3, %step, 3;
  shl.b64 %step4, %step, 2;
  mad.lo.u32 %thread, %block, %threads, %thread;
  mul.wide.u32 %i, %thread, 16;

four:
  add.u64 %last, %i, %step3;
  add.u64 %last, %last, 16;
  setp.gt.u64 %p, %last, %bytes;
  @%p bra one;
  add.u64 %a, %from, %i;
  ld.global.v4.u32 {%x0, %x1, %x2, %x3}, [%a];
  add.u64 %a, %a, %step;
  ld.global.v4.u32 {%x4, %x5, %x6, %x7}, [%a];
  add.u64 %a, %a, %step;
  ld.global.v4.u32 {%x8, %x9, %x10, %x11}, [%a];
  add.u64 %a, %a, %step;
  ld.global.v4.u32 {%x12, %x13, %x14, %x15}, [%a];
  add.u64 %b, %to, %i;
  st.global.v4.u32 [%b], {%x0, %x1, %x2, %x3};
  add.u64 %b, %b, %step;
  st.global.v4.u32 [%b], {%x4, %x5, %x6, %x7};
  add.u64 %b, %b, %step;
  st.global.v4.u32 [%b], {%x8, %x9, %x10, %x11};
  add.u64 %b, %b, %step;
  st.global.v4.u32 [%b], {%x12, %x13, %x14, %x15};
  add.u64 %i, %i, %step4;
  bra four;

one:
  add.u64 %last, %i, 16;
  setp.gt.u64 %p, %last, %bytes;
  @%p bra rest;
  add.u64 %a, %from, %i;
  ld.global.v4.u32 {%x0, %x1, %x2, %x3}, [%a];
  add.u64 %b, %to, %i;
  st.global.v4.u32 [%b], {%x0, %x1, %x2, %x3};
  add.u64 %i, %i, %step;
  bra one;

rest:
  setp.ge.u64 %p, %i, %bytes;
  @%p bra end;
  add.u64 %a, %from, %i;
  ld.global.u8 %byte, [%a];
  add.u64 %b, %to, %i;
  st.global.u8 [%b], %byte;
  add.u64 %i, %i, 1;
  bra rest;

end:
  ret;
}
)";

}  // namespace

CUresult CopyKernel::open() noexcept {
  if (function_ != nullptr) return CUDA_SUCCESS;
  if (module_ == nullptr)
    if (const CUresult error = cuda_.load_module(&module_, kCopyKernel)) return error;
  return cuda_.get_function(&function_, module_, "umem_copy");
}

void CopyKernel::close() noexcept {
  if (module_ != nullptr) cuda_.unload_module(module_);
  module_ = nullptr;
  function_ = nullptr;
}

bool CopyKernel::fits(std::uintptr_t to, std::uintptr_t from) const noexcept {
  return to % kAlignment == 0 && from % kAlignment == 0;
}

CUresult CopyKernel::launch(unsigned blocks, std::uintptr_t to, std::uintptr_t from,
                            std::size_t bytes, CUstream stream) const noexcept {
  CUdeviceptr destination = to, source = from;
  unsigned long long length = bytes;
  void* parameters[] = {&destination, &source, &length};
  return cuda_.launch(function_, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
}

}  // namespace umem
