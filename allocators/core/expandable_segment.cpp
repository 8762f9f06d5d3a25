#include "core/expandable_segment.hpp"

#include <algorithm>
#include <utility>

namespace umem {

void release(VirtualMemory& memory, MovingHandles& moving) {
  for (const HandleId handle : std::exchange(moving.handles, {})) memory.release(handle);
}

std::unique_ptr<ExpandableSegment> ExpandableSegment::reserve(VirtualMemory& memory, int device,
                                                              std::size_t bytes,
                                                              std::size_t handle_bytes) {
  bytes = round_up(bytes, handle_bytes);
  const std::uintptr_t address = memory.reserve(device, bytes, handle_bytes);
  if (address == 0) return nullptr;
  return std::unique_ptr<ExpandableSegment>(
      new ExpandableSegment(memory, device, {address, bytes}, handle_bytes));
}

ExpandableSegment::~ExpandableSegment() {
  for (std::size_t i = 0; i < handles_.size(); ++i) {
    if (handles_[i] == 0) continue;
    memory_.unmap({addresses_.address + i * handle_bytes_, handle_bytes_}, handle_bytes_);
    memory_.release(handles_[i]);
  }
  memory_.unreserve(addresses_);
}

Range ExpandableSegment::whole_handles(Range range) const {
  const std::size_t from = round_up(range.address - addresses_.address, handle_bytes_);
  const std::size_t to =
      (range.address + range.bytes - addresses_.address) / handle_bytes_ * handle_bytes_;
  return {addresses_.address + from, to > from ? to - from : 0};
}

bool ExpandableSegment::map(Range range, MovingHandles& moving) {
  const std::size_t count = range.bytes / handle_bytes_;
  const std::size_t first = number_of(range.address);
  std::vector<HandleId>& handles = moving.handles;
  while (handles.size() < count) {
    const HandleId handle = memory_.create(device_, handle_bytes_);
    if (handle == 0) break;
    handles.push_back(handle);
  }
  if (handles.size() < count || !memory_.map(device_, range, handle_bytes_, handles)) {
    umem::release(memory_, moving);
    return false;
  }
  handles_.resize(std::max(handles_.size(), first + count));
  std::copy_n(handles.begin(), count, handles_.begin() + static_cast<std::ptrdiff_t>(first));
  handles.erase(handles.begin(), handles.begin() + static_cast<std::ptrdiff_t>(count));
  umem::release(memory_, moving);
  return true;
}

void ExpandableSegment::unmap(Range range, MovingHandles& moving) {
  memory_.unmap(range, handle_bytes_);
  const std::size_t first = number_of(range.address);
  for (std::size_t i = first; i < first + range.bytes / handle_bytes_; ++i) {
    const HandleId handle = std::exchange(handles_[i], 0);
    if (moving.handle_bytes == handle_bytes_)
      moving.handles.push_back(handle);
    else
      memory_.release(handle);
  }
}

}  // namespace umem
