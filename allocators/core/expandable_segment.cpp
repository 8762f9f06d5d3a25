#include "core/expandable_segment.hpp"

#include <algorithm>
#include <utility>

namespace umem {

void release(VirtualMemory& memory, MovingHandles& moving) {
  for (const HandleId handle : std::exchange(moving.handles, {})) memory.release(handle);
}

std::unique_ptr<ExpandableSegment> ExpandableSegment::reserve(VirtualMemory& memory, int device,
                                                              std::size_t growth_bytes,
                                                              std::size_t alias_bytes,
                                                              std::size_t handle_bytes) {
  growth_bytes = round_up(growth_bytes, handle_bytes);
  const std::size_t bytes = growth_bytes + handle_bytes + round_up(alias_bytes, handle_bytes);
  const std::uintptr_t address = memory.reserve(device, bytes, handle_bytes);
  if (address == 0) return nullptr;
  return std::unique_ptr<ExpandableSegment>(
      new ExpandableSegment(memory, device, {address, bytes}, growth_bytes, handle_bytes));
}

ExpandableSegment::~ExpandableSegment() {
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (places_[i].owned != 0 || places_[i].shadow != 0)
      memory_.unmap(range_of(i, 1), handle_bytes_);
  for (const auto& [handle, state] : handles_) memory_.release(handle);
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
  for (std::size_t i = first; i < std::min(first + count, places_.size()); ++i) unmap_shadow(i);
  if (handles.size() < count || !memory_.map(device_, {&range, 1}, handle_bytes_, handles)) {
    umem::release(memory_, moving);
    return false;
  }
  for (std::size_t i = 0; i < count; ++i) own(first + i, handles[i]);
  handles.erase(handles.begin(), handles.begin() + static_cast<std::ptrdiff_t>(count));
  umem::release(memory_, moving);
  return true;
}

void ExpandableSegment::unmap(Range range, MovingHandles& moving) {
  memory_.unmap(range, handle_bytes_);
  const std::size_t first = number_of(range.address);
  for (std::size_t i = first; i < first + range.bytes / handle_bytes_; ++i) {
    const HandleId handle = std::exchange(places_[i].owned, 0);
    while (!handles_[handle].shadows.empty()) unmap_shadow(handles_[handle].shadows.back());
    handles_.erase(handle);
    if (moving.handle_bytes == handle_bytes_)
      moving.handles.push_back(handle);
    else
      memory_.release(handle);
  }
}

std::size_t ExpandableSegment::shadow_bytes(Range range) const {
  const std::size_t first = number_of(range.address);
  const std::size_t end = std::min(first + range.bytes / handle_bytes_, places_.size());
  std::size_t count = 0;
  for (std::size_t i = first; i < end; ++i) count += places_[i].shadow != 0;
  return count * handle_bytes_;
}

void ExpandableSegment::append_mapped(std::vector<Range>& to) const {
  std::vector<std::size_t> mapped;
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (places_[i].owned != 0 || places_[i].shadow != 0) mapped.push_back(i);
  for (const Range& range : ranges_of(std::move(mapped))) to.push_back(range);
}

// Adjacent places as one range.
std::vector<Range> ExpandableSegment::ranges_of(std::vector<std::size_t> places) const {
  std::sort(places.begin(), places.end());
  std::vector<Range> ranges;
  for (const std::size_t place : places) {
    const Range next = range_of(place, 1);
    if (!ranges.empty() && ranges.back().address + ranges.back().bytes == next.address)
      ranges.back().bytes += next.bytes;
    else
      ranges.push_back(next);
  }
  return ranges;
}

// A handle that is mapped at a place is used from there.
void ExpandableSegment::own(std::size_t place, HandleId handle) {
  if (places_.size() <= place) places_.resize(place + 1);
  if (places_[place].shadow != 0) forget_shadow(place);
  places_[place].owned = handle;
  handles_[handle].place = place;
}

// It is to be used from another place.
void ExpandableSegment::leave(std::size_t place) {
  Place& left = places_[place];
  left.shadow = std::exchange(left.owned, 0);
  handles_[left.shadow].shadows.push_back(place);
}

void ExpandableSegment::forget_shadow(std::size_t place) {
  std::erase(handles_[std::exchange(places_[place].shadow, 0)].shadows, place);
}

void ExpandableSegment::unmap_shadow(std::size_t place) {
  if (places_[place].shadow == 0) return;
  memory_.unmap(range_of(place, 1), handle_bytes_);
  forget_shadow(place);
}

}  // namespace umem
