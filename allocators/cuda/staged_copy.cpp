#include "cuda/staged_copy.hpp"

#include <algorithm>

namespace umem {
namespace {

// On one H200 the link needs 0.15 ms for 8 MiB, so that the launch cost of a part is small.
constexpr std::size_t kStageBytes = std::size_t{8} << 20;
constexpr int kBlocksPerMultiprocessor = 2;

}  // namespace

CUresult StagedCopy::open(CUdevice device) noexcept {
  if (const CUresult error = kernel_.open()) return error;
  int multiprocessors = 0;
  if (const CUresult error = cuda_.device_attribute(
          &multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device))
    return error;
  blocks_ = static_cast<unsigned>(kBlocksPerMultiprocessor * multiprocessors);
  for (Stage& stage : stages_) {
    for (CUevent* event : {&stage.full, &stage.free})
      if (const CUresult error = cuda_.create_event(event, CU_EVENT_DISABLE_TIMING)) return error;
    if (const CUresult error = cuda_.allocate(&stage.memory, kStageBytes)) return error;
  }
  return CUDA_SUCCESS;
}

void StagedCopy::close() noexcept {
  for (Stage& stage : stages_) {
    for (CUevent event : {stage.full, stage.free})
      if (event != nullptr) cuda_.destroy_event(event);
    if (stage.memory != 0) cuda_.free(stage.memory);
    stage = {};
  }
  kernel_.close();
}

CUresult StagedCopy::copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes,
                          CUstream pages, CUstream link) noexcept {
  while (bytes != 0) {
    const std::size_t part = std::min(bytes, kStageBytes);
    const Stage& stage = stages_[next_];
    next_ = (next_ + 1) % stages_.size();
    if (const CUresult error = through(stage, to, from, part, pages, link)) return error;
    to += part;
    from += part;
    bytes -= part;
  }
  return CUDA_SUCCESS;
}

// Waiting for an event that was never recorded does not wait.
CUresult StagedCopy::through(const Stage& stage, std::uintptr_t to, std::uintptr_t from,
                             std::size_t bytes, CUstream pages, CUstream link) noexcept {
  const bool leaves = direction_ == Direction::to_host;
  const CUstream first = leaves ? pages : link;
  const CUstream second = leaves ? link : pages;
  if (const CUresult error = cuda_.wait_event(first, stage.free, 0)) return error;
  if (const CUresult error =
          leaves ? kernel_.launch(blocks_, stage.memory, from, bytes, pages)
                 : cuda_.copy(stage.memory, from, bytes, link))
    return error;
  if (const CUresult error = cuda_.record_event(stage.full, first)) return error;
  if (const CUresult error = cuda_.wait_event(second, stage.full, 0)) return error;
  if (const CUresult error = leaves ? cuda_.copy(to, stage.memory, bytes, link)
                                    : kernel_.launch(blocks_, to, stage.memory, bytes, pages))
    return error;
  return cuda_.record_event(stage.free, second);
}

}  // namespace umem
