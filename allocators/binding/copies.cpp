#include "binding/copies.hpp"

#ifdef UMEM_HAS_CUDA
#include <stdexcept>

#include "cuda/cuda_calls.hpp"
#include "cuda/fork.hpp"
#include "cuda/scopes.hpp"
#include "cuda/staged_copy.hpp"
#include "cuda/succeeded.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace umem {

#ifdef UMEM_HAS_CUDA
namespace {

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
    CUresult error = copy_.open(handle);
    if (error == CUDA_SUCCESS) error = copy_.furnish();
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
  static const CudaCalls& calls() {
    static const CudaCalls found;
    return found;
  }
  static void check(CUresult error) {
    if (error != CUDA_SUCCESS) throw std::runtime_error("staged copy: " + calls().describe(error));
  }

  const int device_;
  StagedCopy copy_;
};

}  // namespace

void bind_copies(nb::module_& module) {
  nb::class_<Copier>(module, "StagedCopy")
      .def(nb::init<int, bool>(), "device"_a, "leaves"_a)
      .def("fits", &Copier::fits, "to"_a, "source"_a)
      .def("copy", &Copier::copy, "to"_a, "source"_a, "size_bytes"_a, "pages"_a, "link"_a);
}
#else
void bind_copies(nb::module_&) {}
#endif

}  // namespace umem
